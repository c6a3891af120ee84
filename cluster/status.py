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
COLUMNS = ("worker", "state", "pid", "running", "waiting", "moving", "pulse", "KV blocks", "memory")
LINK_COLUMNS = ("decode", "prefill", "state", "backend", "goes", "generation", "reason")
DISTANCES = {"node": "on its node", "zone": "in its zone", "any": "to another zone"}
PLAIN_WIDTH = 180  # of a pipe, which has none
_MIB = 1024 * 1024


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
        _show(status)
    return 0 if status["state"] in {"ready", "degraded"} else 1


def _show(status: Mapping[str, Any]) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    reasons = "; ".join(status.get("reasons", ()))
    console.print(f"{colored(status['state'])}{f': {escape(reasons)}' if reasons else ''}")
    workers = Table(*COLUMNS, header_style="bold", title="Workers")
    for column in workers.columns[2:7]:
        column.justify = "right"
    for worker in status["workers"]:
        workers.add_row(*_worker_row(worker))
    console.print(workers)
    for line in status.get("placement", ()):
        console.print(escape(line), highlight=False)
    for pool, scaling in status.get("scaling", {}).items():
        console.print(_scaling_line(pool, scaling), highlight=False)
    links = Table(*LINK_COLUMNS, title="Links")
    for worker in status["workers"]:
        if worker["pool"] == "decode":  # the decode side owns the link; the other repeats it
            for link in worker.get("links", ()):
                links.add_row(*_link_row(worker["id"], link))
    if links.row_count:
        console.print(links)


def _scaling_line(pool: str, scaling: Mapping[str, Any]) -> str:
    """How many there should be, why, and what speaks now."""
    bounds = f"{scaling['min']} to {scaling['max']}"
    line = (
        f"[bold]{pool}[/] {scaling['serving']} of {scaling['target']} workers ({bounds})"
        f" for {scaling['since_s']:.0f} s: {escape(scaling['reason'])}"
    )
    return f"{line}; now {scaling['demand']:g}: {escape(scaling['signal'])}"


def _worker_row(worker: Mapping[str, Any]) -> list[str]:
    kv = worker.get("kv") or {}
    counts = [f"{kv[state]} {state}" for state in BLOCK_STATES if kv.get(state)]
    return [
        worker["id"],
        colored(worker["state"]),
        str(worker.get("pid", "")),
        *(str(worker.get(key, 0)) for key in ("running", "waiting", "transferring")),
        f"{worker.get('heartbeat_age_s', 0.0):.1f} s",
        ", ".join(counts),
        _memory(worker.get("memory") or {}),
    ]


def _memory(memory: Mapping[str, int]) -> str:
    """What it takes, and how many requests of the greatest length it holds; empty when lost."""
    if not memory:
        return ""
    weights, kv, rest = (
        f"{memory[name] / _MIB:.0f}" for name in ("weights_bytes", "kv_bytes", "buffer_bytes")
    )
    longest = f"{memory['max_concurrency']} of full length"
    return f"weights {weights} + KV {kv} + buffers {rest} MiB, {longest}"


def _link_row(worker_id: str, link: Mapping[str, Any]) -> list[str]:
    return [
        worker_id,
        link["peer"],
        colored(link["state"]),
        link.get("backend", ""),
        DISTANCES.get(link.get("distance", ""), ""),
        str(link.get("generation", "")),
        escape(link.get("reason", "")),
    ]


def colored(state: str) -> str:
    """The state as markup: green, yellow or red."""
    return f"[{COLORS.get(state, 'red')}]{state}[/]"
