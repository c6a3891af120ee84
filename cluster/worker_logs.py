"""What workers of a local cluster write while they start: the phases a person waits for."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

_FILES: Final = "worker-*.err"  # Ray's, one for each process
_ACTOR = re.compile(r":actor_name:((?:prefill|decode)-\d+)$")
# Our log format: only what the engine says, which is silent once it is warm.
_LINE = re.compile(r"\S+ \S+ [A-Z]+ (?P<pid>\d+) engine\.\S+ \[[^]]*\] (?P<text>.*)")


class WorkerLogs:
    """Reads on in every file of a folder. Invariant: each line is told once, when it is whole."""

    def __init__(self, folder: Path, say: Callable[[str, str], None]) -> None:
        self._folder = folder
        self._say = say
        self._read_bytes: dict[Path, int] = {}
        self._workers: dict[Path, str] = {}  # whose file it is, where a worker's

    def update(self) -> None:
        """Tell what is new."""
        for path in sorted(self._folder.glob(_FILES)):
            for line in self._new_lines(path):
                if found := _ACTOR.match(line):
                    self._workers[path] = found[1]
                elif path in self._workers and (found := _LINE.match(line)):
                    self._say(self._workers[path], f"pid {found['pid']}: {found['text']}")

    def _new_lines(self, path: Path) -> list[str]:
        with path.open("rb") as file:
            file.seek(self._read_bytes.get(path, 0))
            whole = file.read().rpartition(b"\n")[0]
        if not whole:
            return []
        self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole) + 1
        return whole.decode(errors="replace").splitlines()
