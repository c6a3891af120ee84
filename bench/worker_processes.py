"""Workers of a bench as processes of their own, as they are deployed."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rpc.description import WorkerDescription
from rpc.token import create_token

_COMMAND = (sys.executable, "-m")
# What a failure shows of each worker's own words.
_NUM_LAST_LINES = 20


@dataclass(slots=True)
class WorkerProcesses:
    """A context; when it ends by an error, what the workers last wrote is shown.

    Invariant: every process that was started is gone afterwards.
    """

    folder: Path
    # of every worker
    settings: Mapping[str, Any]
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    described: dict[str, WorkerDescription] = field(default_factory=dict)

    @property
    def token_file(self) -> Path:
        """The secret all of them share."""
        return self.folder / "token"

    def start(self, pool: str, rank: int = 0) -> WorkerDescription:
        """Start one and wait until it serves."""
        if not self.token_file.exists():
            create_token(self.token_file)
        name = f"{pool}-{rank}"
        config = self.folder / f"{name}.json"
        config.write_text(json.dumps({**self.settings, "token_file": str(self.token_file)}))
        with self._log(name).open("a") as log:
            process = subprocess.Popen(
                [*_COMMAND, f"{pool}_workers", "--config", str(config), "--rank", str(rank)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.processes[name] = process
        assert process.stdout is not None
        described = process.stdout.readline()
        if not described:
            raise RuntimeError(f"{name} ended before it served")
        self.described[name] = WorkerDescription.from_dict(json.loads(described))
        return self.described[name]

    def __enter__(self) -> Self:
        """Nothing runs yet."""
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """End them all."""
        if kind is not None:
            for name in self.processes:
                sys.stderr.write(self.last_words(name))
        for process in self.processes.values():
            process.kill()
            process.wait()

    def last_words(self, name: str) -> str:
        """How a worker fares, and the last lines it wrote to its standard error."""
        status = self.processes[name].poll()
        state = "runs" if status is None else f"ended with {status}"
        lines = self._log(name).read_text(errors="replace").splitlines()[-_NUM_LAST_LINES:]
        return "\n  ".join([f"{name} {state}; it wrote last:", *lines]) + "\n"

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"
