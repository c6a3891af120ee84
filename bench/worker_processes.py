"""Workers of a bench as processes of their own, as they are deployed."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rpc.description import WorkerDescription
from rpc.token import create_token


@dataclass(slots=True)
class WorkerProcesses:
    """Invariant: every process that was started is gone after `stop`."""

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
        process = subprocess.Popen(
            [sys.executable, "-m", f"{pool}_workers", "--config", str(config), "--rank", str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.processes[name] = process
        assert process.stdout is not None
        self.described[name] = WorkerDescription.from_dict(json.loads(process.stdout.readline()))
        return self.described[name]

    def stop(self) -> None:
        """End them all."""
        for process in self.processes.values():
            process.kill()
            process.wait()
