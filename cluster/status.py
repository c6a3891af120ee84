"""`relevo status`: the workers, their blocks and links."""

import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.http_client import FrontError, get_json, open_client

COLORS = {
    "ready": "green",
    "degraded": "yellow",
    "starting": "yellow",
    "connecting": "yellow",
    "draining": "yellow",
}
BLOCK_STATES = ("free", "cached", "used", "held", "quarantined")
COLUMNS = ("worker", "state", "pid", "running", "waiting", "moving", "heartbeat", *BLOCK_STATES)


def run(url: str, *, api_key: str, as_json: bool) -> int:
    """Show it once; the exit status is 0 while the cluster can serve."""
    try:
        with open_client(url, api_key=api_key) as client:
            status = get_json(client, "/v1/status")
    except FrontError as error:
        sys.stderr.write(f"relevo status: {error}\n")
        return 1
    if as_json:
        sys.stdout.write(json.dumps(status, indent=2) + "\n")
    else:
        _show(Console(), status)
    return 0 if status["state"] in {"ready", "degraded"} else 1


def _show(console: Console, status: Mapping[str, Any]) -> None:
    reasons = "; ".join(status.get("reasons", ()))
    console.print(f"{_colored(status['state'])}{f': {escape(reasons)}' if reasons else ''}")
    workers = Table(*COLUMNS, header_style="bold", title="Workers (blocks by state on the right)")
    for column in workers.columns[2:]:
        column.justify = "right"
    for worker in status["workers"]:
        workers.add_row(*_worker_row(worker))
    console.print(workers)
    links = Table(
        "decode", "prefill", "state", "backend", "generation", "reason", header_style="bold"
    )
    for worker in status["workers"]:
        for link in worker.get("links", ()):
            links.add_row(
                worker["id"],
                link["peer"],
                _colored(link["state"]),
                link.get("backend", ""),
                str(link.get("generation", "")),
                escape(link.get("reason", "")),
            )
    if links.row_count:
        links.title = "Links"
        console.print(links)


def _worker_row(worker: Mapping[str, Any]) -> list[str]:
    kv = worker.get("kv") or {}
    return [
        worker["id"],
        _colored(worker["state"]),
        str(worker.get("pid", "")),
        *(str(worker.get(key, 0)) for key in ("running", "waiting", "transferring")),
        f"{worker.get('heartbeat_age_s', 0.0):.1f} s",
        *(str(kv.get(state, "")) for state in BLOCK_STATES),
    ]


def _colored(state: str) -> str:
    return f"[{COLORS.get(state, 'red')}]{state}[/]"
