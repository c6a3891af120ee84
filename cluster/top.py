"""`relevo top`: the dashboard's picture of the cluster in a terminal, once a second."""

import json
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cluster.http_client import FrontError, not_reached, open_client, raise_for_error
from cluster.status import colored

BAR_CELLS = 24
PLAIN_WIDTH = 120  # of a pipe, which has none
NUM_ROUTES, NUM_EVENTS = 5, 6
BLOCK_COLORS = {
    "used": "green",
    "held": "yellow",
    "cached": "blue",
    "quarantined": "red",
    "free": "bright_black",
}


def run(url: str, *, api_key: str) -> int:
    """Show it until Ctrl-C; into a pipe once."""
    is_live = sys.stdout.isatty()
    console = Console() if is_live else Console(width=PLAIN_WIDTH)
    links = Rates()
    try:
        with open_client(url, api_key=api_key) as client:
            pictures = _pictures(client)
            if not is_live:
                console.print(draw(next(pictures), links))
                return 0
            with Live(console=console, screen=True, auto_refresh=False) as live:
                for picture in pictures:
                    live.update(draw(picture, links), refresh=True)
    except KeyboardInterrupt:
        return 0
    except FrontError as error:
        sys.stderr.write(f"relevo top: {error}\n")
        return 1
    sys.stderr.write("relevo top: the cluster has ended the stream\n")
    return 1


def _pictures(client: httpx.Client) -> Iterator[Mapping[str, Any]]:
    try:
        wanted = {"accept": "text/event-stream"}
        with client.stream("GET", "/dashboard", headers=wanted) as response:
            if not response.is_success:
                response.read()
            raise_for_error(response)
            for line in response.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))
    except httpx.TransportError as error:
        raise not_reached(client, error) from error


class Rates:
    """Turns what links moved in all into bytes per second, picture by picture."""

    def __init__(self) -> None:
        self._moved: dict[tuple[str, str, int], int] = {}
        self._uptime_s: float | None = None

    def take(self, picture: Mapping[str, Any]) -> dict[tuple[str, str, int], float]:
        """The rates since the picture before; nothing at the first one."""
        moved = {
            (link["peer"], worker["id"], link["generation"]): link["moved_bytes"]
            for worker in picture["workers"]
            if worker["pool"] == "decode"
            for link in worker["links"]
        }
        before, self._moved = self._moved, moved
        elapsed_s = picture["uptime_s"] - (self._uptime_s or picture["uptime_s"])
        self._uptime_s = picture["uptime_s"]
        if elapsed_s <= 0:
            return dict.fromkeys(moved, 0.0)
        return {key: (count - before.get(key, count)) / elapsed_s for key, count in moved.items()}


def draw(picture: Mapping[str, Any], rates: Rates) -> RenderableType:
    """One picture."""
    moved = rates.take(picture)
    reasons = "; ".join(picture.get("reasons", ()))
    head = Text.from_markup(
        f"[bold]relevo[/] {colored(picture['state'])} {escape(picture['model'])}"
        f"  up {picture['uptime_s']:.0f} s  {picture['running']} streams  {escape(reasons)}"
    )
    parts: list[RenderableType] = [head, _traffic(picture), _workers(picture)]
    links = _links(picture, moved)
    if links.row_count:
        parts.append(links)
    parts += [_routes(picture), _events(picture)]
    return Group(*parts)


def _traffic(picture: Mapping[str, Any]) -> Table:
    traffic = picture["traffic"]
    cells = {
        "req/s": _number(traffic["requests_per_s"]),
        "prompt tok/s": _number(traffic["prompt_tokens_per_s"]),
        "output tok/s": _number(traffic["output_tokens_per_s"]),
        "queued": str(picture["queued"]),
        "TTFT p50/p95 ms": _pair(traffic, "first_token"),
        "ITL p50/p95 ms": _pair(traffic, "inter_token"),
        "hits %": _number(traffic["cache_hit_share"], 100),
        "errors %": _number(traffic["error_share"], 100),
    }
    table = Table(box=None, header_style="dim", padding=(1, 2, 0, 0))
    for name in cells:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row(*cells.values(), style="bold")
    return table


def _workers(picture: Mapping[str, Any]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("worker", "state", "run", "wait", "move", "KV blocks", ""):
        side = "right" if name in {"run", "wait", "move"} else "left"
        table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for worker in picture["workers"]:
        kv = worker.get("kv") or {}
        told = ", ".join(f"{kv[state]} {state}" for state in BLOCK_COLORS if kv.get(state))
        counts = (str(worker[key]) for key in ("running", "waiting", "transferring"))
        table.add_row(worker["id"], colored(worker["state"]), *counts, _bar(kv), told)
    return table


def _bar(kv: Mapping[str, int]) -> Text:
    bar = Text()
    if kv.get("total"):
        end, done = 0, 0
        for state, color in BLOCK_COLORS.items():
            end += kv.get(state, 0)
            cells = round(BAR_CELLS * end / kv["total"]) - done
            bar.append("█" * cells, style=color)
            done += cells
    return bar


def _links(picture: Mapping[str, Any], moved: Mapping[tuple[str, str, int], float]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("link", "state", "backend", "MB/s", "reason"):
        table.add_column(name, justify="right" if name == "MB/s" else "left", no_wrap=True)
    for worker in picture["workers"]:
        for link in worker["links"] if worker["pool"] == "decode" else ():
            rate = moved.get((link["peer"], worker["id"], link["generation"]), 0.0)
            table.add_row(
                f"{link['peer']} -> {worker['id']}",
                colored(link["state"]),
                link["backend"],
                f"{rate / 1e6:.1f}",
                "" if link["state"] == "ready" else escape(link["reason"]),
            )
    return table


def _routes(picture: Mapping[str, Any]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("request", "route", "cost ms", "terms ms"):
        table.add_column(name, no_wrap=name != "terms ms")  # what is too long wraps there
    for route in picture.get("routes", ())[: -NUM_ROUTES - 1 : -1]:
        chosen = route["chosen"]
        cost = dict(chosen["cost"])
        total_s = cost.pop("total_s")
        terms = ", ".join(
            f"{name.removesuffix('_s')} {1e3 * value:.1f}" for name, value in cost.items() if value
        )
        pair = f"{chosen['prefill'] or 'alone'} -> {chosen['decode']}"
        table.add_row(route["request_id"][:12], pair, f"{1e3 * total_s:.1f}", terms)
    return table


def _events(picture: Mapping[str, Any]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("event", no_wrap=True)
    table.add_column("")
    styles = {"bad": "red", "good": "green"}
    for event in picture["events"][:NUM_EVENTS]:
        at = datetime.fromtimestamp(event["at"]).strftime("%H:%M:%S")
        table.add_row(at, Text(event["text"], style=styles.get(event["level"], "")))
    return table


def _number(value: float | None, factor: float = 1) -> str:
    return "-" if value is None else f"{factor * value:.1f}"


def _pair(traffic: Mapping[str, Any], name: str) -> str:
    return " / ".join(_number(traffic[f"{name}_{share}_s"], 1e3) for share in ("p50", "p95"))
