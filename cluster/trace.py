"""`relevo trace`: where the time of one request went, as a waterfall of its spans."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cluster.http_client import FrontError, get_json, open_client

BAR_CELLS = 40
PLAIN_WIDTH = 140  # of a pipe, which has none
COLORS = {"prefill": "blue", "kv": "magenta", "decode": "green", "queue": "yellow"}
_FIRST, _SECOND = "relevo.first_token.", "relevo.second_token."
_COST, _NEXT_COST = "relevo.cost.", "relevo.next_best.cost."


def run(url: str, name: str, *, api_key: str, as_json: bool) -> int:
    """Show one request; the exit status is 0 when there is one of that name."""
    try:
        with open_client(url, api_key=api_key) as client:
            trace = get_json(client, f"/v1/traces/{quote(name, safe='')}")
    except FrontError as error:
        sys.stderr.write(f"relevo trace: {error}\n")
        return 1
    if as_json:
        sys.stdout.write(json.dumps(trace, indent=2) + "\n")
    else:
        show(trace, Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH))
    return 0


def show(trace: Mapping[str, Any], console: Console) -> None:
    """Print the waterfall, the sums, and what the router weighed."""
    spans: Sequence[Mapping[str, Any]] = trace["spans"]
    total_s = max((each["start_s"] + each["duration_s"] for each in spans), default=0.0)
    console.print(
        f"[bold]{escape(trace['request_id'] or trace['trace_id'])}[/]"
        f"  {trace['duration_s'] * 1e3:.1f} ms  trace {trace['trace_id']}"
    )
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for column, side in (("span", "left"), ("process", "left"), ("", "left"), ("at ms", "right")):
        table.add_column(column, justify=side, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("ms", justify="right", no_wrap=True)
    for span, depth in _in_order(spans):
        table.add_row(
            Text("  " * depth + span["name"], style="red" if span["error"] else ""),
            Text(span["process"], style="dim"),
            _bar(span, total_s),
            f"{span['start_s'] * 1e3:.1f}",
            f"{span['duration_s'] * 1e3:.1f}",
        )
    console.print(table)
    for span in spans:
        _show_facts(span, console)
    if trace["num_dropped_spans"]:
        console.print(f"{trace['num_dropped_spans']} more spans were dropped")


def _in_order(spans: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], int]]:
    """Parents before children, siblings as they began, with their depth."""
    known = {each["span_id"] for each in spans}
    children: dict[str | None, list[Mapping[str, Any]]] = {}
    for each in spans:
        parent = each["parent_id"] if each["parent_id"] in known else None
        children.setdefault(parent, []).append(each)
    ordered: list[tuple[Mapping[str, Any], int]] = []
    waiting = [(each, 0) for each in reversed(children.get(None, []))]
    while waiting:
        span, depth = waiting.pop()
        ordered.append((span, depth))
        waiting += [(each, depth + 1) for each in reversed(children.get(span["span_id"], []))]
    return ordered


def _bar(span: Mapping[str, Any], total_s: float) -> Text:
    cells = BAR_CELLS / total_s if total_s > 0 else 0.0
    start = min(int(max(span["start_s"], 0.0) * cells), BAR_CELLS - 1)
    length = max(min(round(span["duration_s"] * cells), BAR_CELLS - start), 1)
    color = "red" if span["error"] else COLORS.get(span["name"].partition(".")[0], "cyan")
    return Text(" " * start) + Text("━" * length, style=color)


def _show_facts(span: Mapping[str, Any], console: Console) -> None:
    facts = span["attributes"]
    for title, prefix in (("first token", _FIRST), ("to the second", _SECOND)):
        if parts := _with_prefix(facts, prefix):
            sums = " + ".join(f"{name} {ms:.1f}" for name, ms in parts.items())
            console.print(f"{title} = {sums} = {sum(parts.values()):.1f} ms", highlight=False)
    if span["name"] == "route":
        chosen = _pair(facts, "relevo.prefill.worker", "relevo.decode.worker")
        console.print(f"chosen {chosen}: {_terms(facts, _COST)}", highlight=False)
        if parts := _with_prefix(facts, _NEXT_COST):
            other = _pair(facts, "relevo.next_best.prefill", "relevo.next_best.decode")
            console.print(f"next best {other}: {_terms(facts, _NEXT_COST)}", highlight=False)
    for event in span["events"]:
        told = ", ".join(
            f"{key.rpartition('.')[2]} {value}" for key, value in event["attributes"].items()
        )
        console.print(
            f"{event['at_s'] * 1e3:.1f} ms: {event['name']} {escape(told)}", highlight=False
        )
    if span["error"]:
        console.print(f"[red]{escape(span['name'])}: {escape(span['error'])}[/]", highlight=False)


def _with_prefix(facts: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Seconds of that prefix, as milliseconds by their bare names."""
    return {
        key.removeprefix(prefix).removesuffix("_s"): 1e3 * value
        for key, value in facts.items()
        if key.startswith(prefix)
    }


def _terms(facts: Mapping[str, Any], prefix: str) -> str:
    terms = _with_prefix(facts, prefix)
    total = terms.pop("total", 0.0)
    told = ", ".join(f"{name} {ms:.1f}" for name, ms in terms.items() if ms)
    return f"{total:.1f} ms ({told})"


def _pair(facts: Mapping[str, Any], prefill: str, decode: str) -> str:
    return f"{facts.get(prefill) or 'alone'} -> {facts.get(decode)}"
