"""Starts workers as plain processes on one machine and ends exactly those."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rpc.description import WorkerDescription
from rpc.token import create_token

REPOSITORY = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 120.0

ENGINE = {
    "dtype": "float64",
    "block_size": 8,
    "num_kv_blocks": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "max_model_len": 512,
    "num_threads": 1,
    "device": "cpu",
}
KV_TRANSFER = {
    "backend": "gloo",
    "digest_sample": 1.0,
    "transfer_timeout_s": 2.0,
    "lease_s": 2.0,
}
# Where no deadline of the KV plane is what a test is about: what a busy machine makes slow must not
# look like a lost peer.
PATIENT = {"transfer_timeout_s": 15.0, "lease_s": 30.0}

# Requests with this label are slow in workers with this environment: time to do something in the
# middle of them.
SLOW = "slow"
SLOW_STEPS = {
    "RELEVO_TESTING": "1",
    "RELEVO_FAULT_PLAN": json.dumps(
        [
            {
                "point": point,
                "action": "delay",
                "delay_s": 0.03,
                "count": 0,
                "match": {"request_label": SLOW},
            }
            for point in ("prefill_step", "decode_step")
        ]
    ),
}


def worker_settings(
    model_path: Path, token_file: Path, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Plain configuration of a small worker; `overrides` may hold engine and kv_transfer parts."""
    engine, kv_transfer = overrides.get("engine", {}), overrides.get("kv_transfer", {})
    return {
        "token_file": str(token_file),
        "drain_s": 6.0,
        **overrides,
        "engine": {"model_path": str(model_path), "model_id": "tiny", **ENGINE, **engine},
        "kv_transfer": {**KV_TRANSFER, **kv_transfer},
    }


@dataclass(slots=True)
class WorkerProcess:
    """One worker we started."""

    pool: str
    rank: int
    process: subprocess.Popen[str]
    stderr_path: Path
    description: WorkerDescription | None = None

    @property
    def worker_id(self) -> str:
        return f"{self.pool}-{self.rank}"

    @property
    def described(self) -> WorkerDescription:
        assert self.description is not None, f"{self.worker_id} has not started"
        return self.description

    def stderr(self) -> str:
        return self.stderr_path.read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@dataclass(slots=True)
class ClusterProcesses:
    """Workers of one test. Invariant: every process started here is gone after `stop`."""

    folder: Path
    model_path: Path
    engine: Mapping[str, Any] = field(default_factory=dict)
    kv_transfer: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    workers: list[WorkerProcess] = field(default_factory=list)

    @property
    def token_file(self) -> Path:
        return self.folder / "token"

    def start(
        self,
        pool: str,
        rank: int = 0,
        *,
        engine: Mapping[str, Any] | None = None,
        kv_transfer: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> WorkerProcess:
        """Start one worker without waiting for it."""
        if not self.token_file.exists():
            create_token(self.token_file)
        layered = {
            "engine": {**self.engine, **(engine or {})},
            "kv_transfer": {**self.kv_transfer, **(kv_transfer or {})},
            **(config or {}),
        }
        settings = worker_settings(self.model_path, self.token_file, layered)
        number = len(self.workers)
        config_path = self.folder / f"{pool}-{rank}-{number}.json"
        config_path.write_text(json.dumps(settings))
        stderr_path = self.folder / f"{pool}-{rank}-{number}.stderr"
        arguments = ["-m", f"{pool}_workers", "--config", str(config_path), "--rank", str(rank)]
        paths = [str(REPOSITORY), str(REPOSITORY / "protos")]
        with stderr_path.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=REPOSITORY,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(paths),
                    **self.environment,
                    **(environment or {}),
                },
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        worker = WorkerProcess(pool, rank, process, stderr_path)
        self.workers.append(worker)
        return worker

    def newest(self, worker_id: str) -> WorkerProcess | None:
        """The process that holds this place now, if it lives."""
        for worker in reversed(self.workers):
            if worker.worker_id == worker_id:
                return worker if worker.process.poll() is None else None
        return None

    def ensure(self, *, prefill: int = 1, decode: int = 1) -> list[WorkerDescription]:
        """Start what does not live of so many workers; importing torch is what a start costs."""
        places = [("prefill", rank) for rank in range(prefill)]
        places += [("decode", rank) for rank in range(decode)]
        workers = [self.newest(f"{pool}-{rank}") or self.start(pool, rank) for pool, rank in places]
        return [worker.description or self.wait_for(worker) for worker in workers]

    def wait_for(self, worker: WorkerProcess) -> WorkerDescription:
        """Read the one line a worker prints when it serves."""
        assert worker.process.stdout is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if select.select([worker.process.stdout], [], [], 0.1)[0]:
                line = worker.process.stdout.readline()
                if line:
                    worker.description = WorkerDescription.from_dict(json.loads(line))
                    return worker.description
            if worker.process.poll() is not None:
                break
        raise RuntimeError(f"{worker.worker_id} did not start:\n{worker.stderr()[-4000:]}")

    def stop(self, worker: WorkerProcess, *, timeout_s: float = 15.0) -> int:
        """End one worker with SIGTERM, or SIGKILL when that does not help; its exit status."""
        if worker.process.poll() is None:
            worker.signal(signal.SIGCONT)
            worker.signal(signal.SIGTERM)
            try:
                worker.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                worker.process.kill()
        return worker.process.wait()

    def kill(self, worker: WorkerProcess) -> None:
        """End one worker as a crash would."""
        worker.process.kill()
        worker.process.wait()

    def stop_all(self) -> None:
        """End every worker: a second SIGTERM cuts a drain short."""
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.signal(signal.SIGCONT)
                worker.signal(signal.SIGTERM)
        for worker in self.workers:
            if worker.process.poll() is None:
                try:
                    worker.process.wait(3.0)
                except subprocess.TimeoutExpired:
                    worker.signal(signal.SIGTERM)
        for worker in self.workers:
            self.stop(worker, timeout_s=3.0)
            if worker.process.stdout is not None:
                worker.process.stdout.close()
