"""What `relevo serve` shows: one line per phase and per worker, then the table of addresses."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text


class Progress:
    """Writes lines with the seconds since the start in front."""

    def __init__(self, console: Console, *, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._now = now
        self._started_s = now()

    def say(self, phase: str, text: str) -> None:
        """Write one line."""
        elapsed_s = self._now() - self._started_s
        line = Text.assemble((f"{elapsed_s:6.1f} s  ", "dim"), (f"{phase:<11}", "bold"), text)
        self._console.print(line, soft_wrap=True, highlight=False)

    def show(self, rows: Mapping[str, str], *, footer: str) -> None:
        """Write the table of addresses and the line to paste; no line is ever broken."""
        width = max(len(name) for name in rows) + 2
        lines = [Text.assemble("  ", (f"{name:<{width}}", "bold"), rows[name]) for name in rows]
        for line in ("", *lines, "", Text(footer), ""):
            self._console.print(line, soft_wrap=True, highlight=False)


class WorkerWatch:
    """Turns successive `/v1/status` bodies into lines: one for each worker or link that changed."""

    def __init__(self, say: Callable[[str, str], None]) -> None:
        self._say = say
        self._seen: dict[str, str] = {}

    def update(self, status: Mapping[str, Any]) -> None:
        """Say what is new in this status."""
        for worker in status.get("workers", ()):
            self._tell(worker["id"], _worker_line(worker))
            # The decode side owns a link; the prefill side repeats it.
            for link in worker.get("links", ()) if worker["pool"] == "decode" else ():
                self._tell(f"{worker['id']} ← {link['peer']}", _link_line(link), phase=worker["id"])

    def _tell(self, key: str, line: str, *, phase: str = "") -> None:
        if self._seen.get(key) != line:
            self._seen[key] = line
            self._say(phase or key, f"link {key}: {line}" if phase else line)


def _worker_line(worker: Mapping[str, Any]) -> str:
    kv = worker.get("kv") or {}
    blocks = f", {kv['total']} KV blocks" if kv.get("total") else ""
    memory = worker.get("memory") or {}
    room = f", room for {memory['max_concurrency']} longest requests" if memory else ""
    return f"{worker['state']} (pid {worker.get('pid')}{blocks}{room})"


def _link_line(link: Mapping[str, Any]) -> str:
    reason = f": {link['reason']}" if link.get("reason") else ""
    return f"{link['state']} ({link.get('backend') or 'no backend'}){reason}"
