"""What `relevo serve` shows: one line per phase and per worker, then the table of addresses."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from rpc.start_clock import describe_parts

_MIB = 1024 * 1024


class Progress:
    """Writes lines with the seconds since the start in front."""

    def __init__(self, console: Console, *, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._now = now
        self._started_s = now()

    def say(self, phase: str, text: str) -> None:
        """Write one line."""
        elapsed_s = self._now() - self._started_s
        line = Text.assemble((f"{elapsed_s:6.1f} s  ", "dim"), (f"{phase:<10} ", "bold"), text)
        self._console.print(line, soft_wrap=True, highlight=False)

    def show(self, rows: Mapping[str, str], *, footer: str) -> None:
        """Write the table of addresses and the line to paste; no line is ever broken."""
        width = max(len(name) for name in rows) + 2
        lines = [Text.assemble("  ", (f"{name:<{width}}", "bold"), rows[name]) for name in rows]
        for line in ("", *lines, "", Text(footer), ""):
            self._console.print(line, soft_wrap=True, highlight=False)


class WorkerWatch:
    """Turns successive statuses of an ingress into lines: one for each worker or link that changed,
    and what each ingress tells of its traffic.
    """

    def __init__(self, say: Callable[[str, str], None]) -> None:
        self._say = say
        self._seen: dict[str, str] = {}
        self._num_stats: dict[str, int] = {}  # by ingress: whichever is asked answers

    def update(self, status: Mapping[str, Any]) -> None:
        """Say what is new in this status."""
        self._tell_stats(status.get("stats") or {})
        for pool, scaling in status.get("scaling", {}).items():
            line = f"{scaling['target']} worker(s): {scaling['reason']}"
            self._tell(f"scaling {pool}", pool, line)
        for worker in status.get("workers", ()):
            self._tell(worker["id"], worker["id"], _worker_line(worker))
            # The decode side owns a link; the prefill side repeats it.
            for link in worker.get("links", ()) if worker["pool"] == "decode" else ():
                pair = f"link {worker['id']} ← {link['peer']}"
                self._tell(pair, worker["id"], f"{pair}: {_link_line(link)}")

    def _tell_stats(self, stats: Mapping[str, Any]) -> None:
        name, number = stats.get("of", ""), stats.get("number", 0)
        if number and number != self._num_stats.get(name):
            self._num_stats[name] = number
            self._say("stats", stats["line"])

    def _tell(self, subject: str, phase: str, line: str) -> None:
        if self._seen.get(subject) != line:
            self._seen[subject] = line
            self._say(phase, line)


def _worker_line(worker: Mapping[str, Any]) -> str:
    kv, memory = worker.get("kv") or {}, worker.get("memory") or {}
    facts = [f"pid {worker.get('pid')}"]
    if memory:
        facts.append(f"weights {memory['weights_bytes'] / _MIB:.0f} MiB")
    if kv.get("total"):
        size = f" in {memory['kv_bytes'] / _MIB:.0f} MiB" if memory else ""
        facts.append(f"{kv['total']} KV blocks{size}")
    if memory:
        facts.append(f"room for {memory['max_concurrency']} longest requests")
    if parts_s := worker.get("start_s"):
        facts.append(f"started in {describe_parts(parts_s)}")
    return f"{worker['state']} ({', '.join(facts)})"


def _link_line(link: Mapping[str, Any]) -> str:
    reason = f": {link['reason']}" if link.get("reason") else ""
    return f"{link['state']} ({link.get('backend') or 'no backend'}){reason}"
