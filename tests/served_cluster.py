"""Runs `relevo serve` as a person would, and looks at what it leaves behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import httpx
import psutil

from cluster.server_process import free_ports
from tests.shared_files import shared_by

RELEVO = Path(sys.executable).with_name("relevo")
READY_WITHIN_S = 170.0  # seconds on a quiet machine
SMALL = (
    "model.dtype=float64",
    "model.max_model_len=512",
    "engine.block_size=8",
    "engine.num_kv_blocks=64",
    "engine.max_num_seqs=8",
    "engine.max_num_batched_tokens=64",
    "engine.num_threads=1",
    "kv_transfer.digest_sample=1.0",
    "prefill.drain_s=6",
    "decode.drain_s=6",
)


def is_taken(port: int) -> bool:
    """Whether somebody listens on this port of the loopback address."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@dataclass(slots=True)
class ServedCluster:
    """One `relevo serve` process with everything below it."""

    process: subprocess.Popen[str]
    http_port: int
    grpc_port: int
    lines: list[tuple[float, str]] = field(default_factory=list)  # stdout with arrival times
    errors: list[tuple[float, str]] = field(default_factory=list)  # stderr with arrival times
    seen: dict[int, float] = field(default_factory=dict)  # pid -> start of every descendant
    shared: set[str] = field(default_factory=set)  # files in memory that they had

    @classmethod
    def start(
        cls,
        model: Path,
        *assignments: str,
        environment: Mapping[str, str] | None = None,
        small: bool = True,
        ports: tuple[int, int] | None = None,
    ) -> "ServedCluster":
        """Start it without waiting for it."""
        http_port, grpc_port = ports or free_ports(2)
        keys = [
            f"model.path={model}",
            f"ingress.http_port={http_port}",
            f"ingress.grpc_port={grpc_port}",
            *(SMALL if small else ()),
            *assignments,
        ]
        command = [str(RELEVO), "serve"]
        for key in keys:
            command += ["--set", key]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # a signal to the test run must not reach it twice
        )
        cluster = cls(process, http_port, grpc_port)
        for stream, into in ((process.stdout, cluster.lines), (process.stderr, cluster.errors)):
            assert stream is not None
            threading.Thread(target=_collect, args=(stream, into), daemon=True).start()
        return cluster

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def output(self) -> str:
        return "\n".join(line for _, line in [*self.lines, *self.errors])

    def wait_until_shown(self, timeout_s: float = READY_WITHIN_S) -> None:
        """Wait until the table of addresses is there: everything serves."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.note_descendants()
            if any(line.startswith("curl ") for _, line in self.lines):
                self.note_belongings()
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise AssertionError(f"not ready:\n{self.output()}")

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = httpx.get(f"{self.url}/v1/status", timeout=10).json()
        return status

    def worker(self, worker_id: str) -> dict[str, Any]:
        found = [each for each in self.status()["workers"] if each["id"] == worker_id]
        return next((each for each in found if each["state"] != "lost"), found[0])

    def wait_for(self, worker_id: str, *, other_than: int, timeout_s: float = 120.0) -> int:
        """Wait until the worker is ready in a newer process; return its incarnation."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            worker = self.worker(worker_id)
            if worker["state"] == "ready" and worker["incarnation"] != other_than:
                return int(worker["incarnation"])
            time.sleep(0.2)
        raise AssertionError(f"{worker_id} did not come back: {self.status()}")

    def note_descendants(self) -> None:
        """Remember every process below it, to look for them when it has ended."""
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.seen[child.pid] = child.create_time()
        except psutil.NoSuchProcess:
            return

    def note_belongings(self) -> None:
        """Remember every process below it and the memory that they share with each other."""
        self.note_descendants()
        self.shared |= shared_by(self.seen)

    def survivors(self) -> list[int]:
        """Descendants that were seen once and still live."""
        alive = []
        for pid, started in self.seen.items():
            try:
                process = psutil.Process(pid)
                is_same = process.create_time() == started
                if is_same and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(pid)
            except psutil.NoSuchProcess:
                continue
        return alive

    def run_directory(self) -> Path:
        match = re.search(r"^ *Logs +(\S+)/ray/session_latest/logs$", self.output(), re.MULTILINE)
        assert match, self.output()
        return Path(match[1])

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 90.0) -> int:
        """Signal it and wait for its end."""
        if self.process.poll() is None:
            self.note_belongings()
            self.process.send_signal(number)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float) -> int:
        """Wait for its end; when it does not come, kill it with all that is below it."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.note_descendants()
            for pid in [self.process.pid, *self.survivors()]:
                os.kill(pid, signal.SIGKILL)
            self.process.wait()
            raise AssertionError(f"did not end in {timeout_s} s:\n{self.output()}") from None


def _collect(stream: TextIO, into: list[tuple[float, str]]) -> None:
    for line in stream:
        into.append((time.monotonic(), line.rstrip("\n")))
