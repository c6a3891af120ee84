"""The live cluster under fire: who is in it, what may be done to it, what it holds."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.served_cluster import ServedCluster

Worker = dict[str, Any]  # as /v1/status tells of it
Fault = Mapping[str, Any]  # as in RELEVO_FAULT_PLAN

POOLS = ("prefill", "decode")
START_WITHIN_S = 400.0  # a quiet machine needs 40
WHOLE_WITHIN_S = 180.0  # a killed worker imports torch again
QUIET_WITHIN_S = 2.0  # promised
DRAIN_S = 20.0  # enough for any stream here, and for those that it makes wait
CHAOS = (
    f"prefill.drain_s={DRAIN_S:g}",
    f"decode.drain_s={DRAIN_S:g}",
    "prefill.replicas=2",
    "decode.replicas=2",
    "router.local_prefill=never",
    "router.max_waiting_requests=32",
    # Smaller than what one request may ask for, and than what eight of them need together.
    "model.max_model_len=1024",
    "engine.num_kv_blocks=96",
)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one process has of the machine."""

    num_fds: int
    num_threads: int
    rss_bytes: int

    @classmethod
    def of(cls, pid: int) -> "Footprint | None":
        """None when the process is gone."""
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                return cls(process.num_fds(), process.num_threads(), process.memory_info().rss)
        except psutil.NoSuchProcess:
            return None


@dataclass(slots=True)
class LiveCluster:
    """Invariant: after `heal` no fault is in force and no process stands still."""

    served: ServedCluster
    faults: Path  # the folder all processes look into
    http: httpx.AsyncClient
    frozen: set[int] = field(default_factory=set)  # pids
    stems: dict[str, str] = field(default_factory=dict)  # of fault files, by what they are for

    @classmethod
    def start(
        cls,
        model: Path,
        faults: Path,
        *assignments: str,
        environment: Mapping[str, str] | None = None,
    ) -> "LiveCluster":
        """Start `relevo serve` so that faults can be struck into it later."""
        testing = {"RELEVO_TESTING": "1", "RELEVO_FAULT_DIR": str(faults), **(environment or {})}
        served = ServedCluster.start(model, *CHAOS, *assignments, environment=testing)
        return cls(served, faults, httpx.AsyncClient(base_url=served.url, timeout=30.0))

    # What it says of itself.

    async def status(self, num_routes: int = 0) -> dict[str, Any]:
        response = await self.http.get("/v1/status", params={"routes": num_routes})
        status: dict[str, Any] = response.json()
        return status

    async def workers(self, pool: str = "") -> list[Worker]:
        """Those that are ready."""
        workers = (await self.status())["workers"]
        return [w for w in workers if w["state"] == "ready" and w["pool"].startswith(pool)]

    async def worker(self, worker_id: str) -> Worker:
        """The newest of this name that is not lost, else the lost one, shown for a minute."""
        found = [w for w in (await self.status())["workers"] if w["id"] == worker_id]
        newest = max(found, key=_newest, default=None)
        return newest or {"id": worker_id, "state": "lost", "incarnation": 0}

    async def is_whole(self) -> bool:
        """Two workers a pool, and every pair of them linked."""
        workers = await self.workers()
        links = [
            link["peer"]
            for worker in workers
            for link in worker["links"]
            if worker["pool"] == "decode" and link["state"] == "ready"
        ]
        return len(workers) == 4 and len(links) == 4

    async def until_whole(self) -> None:
        end_s = time.monotonic() + WHOLE_WITHIN_S
        while not await self.is_whole():
            assert time.monotonic() < end_s, await self.status()
            await asyncio.sleep(0.1)

    async def metric(self, name: str, **labels: str) -> float:
        """Sum over all series of this name that bear these labels."""
        total = 0.0
        for line in (await self.http.get("/metrics")).text.splitlines():
            series, _, value = line.rpartition(" ")
            wanted = all(f'{key}="{label}"' in series for key, label in labels.items())
            if series.partition("{")[0] == name and wanted:
                total += float(value)
        return total

    def ingress_pid(self) -> int:
        for process in psutil.Process(self.served.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                for connection in process.net_connections("tcp"):
                    is_listening = connection.status == psutil.CONN_LISTEN
                    if is_listening and connection.laddr.port == self.served.http_port:
                        return process.pid
        raise AssertionError("nobody listens on the HTTP port")

    async def footprints(self) -> dict[int, Footprint]:
        """Of the ingress and of every worker, by pid."""
        pids = [self.ingress_pid(), *(worker["pid"] for worker in await self.workers())]
        found = {pid: Footprint.of(pid) for pid in pids}
        return {pid: footprint for pid, footprint in found.items() if footprint is not None}

    # What is done to it.

    def strike(self, name: str, *faults: Fault) -> None:
        """Put faults in force until `lift` or `heal`."""
        self.lift(name)
        # A name of its own for each strike: counters bear it.
        stem = self.stems[name] = f"{len(self.stems)}-{time.monotonic_ns()}"
        made = self.faults / f"{stem}.made"
        made.write_text(json.dumps(faults))
        made.rename(self.faults / f"{stem}.json")

    def lift(self, name: str) -> None:
        if name in self.stems:
            (self.faults / f"{self.stems[name]}.json").unlink(missing_ok=True)

    def num_hits(self, name: str, number: int = 0) -> int:
        """How often the point of this fault of the newest strike was passed."""
        path = self.faults / f"{self.stems[name]}-{number}.hits"
        return int(path.read_text()) if path.exists() else 0

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def freeze(self, pid: int) -> None:
        self.frozen.add(pid)
        os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in self.frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.frozen.clear()

    def heal(self) -> None:
        for file in self.faults.glob("*.json"):
            file.unlink()
        self.thaw()

    async def close(self) -> None:
        self.heal()
        await self.http.aclose()


def _newest(worker: Worker) -> tuple[bool, int]:
    return worker["state"] != "lost", worker["incarnation"]


def owned(worker: Worker) -> Sequence[int]:
    """What must be 0 on a worker at rest."""
    return [
        *(worker[name] for name in ("running", "waiting", "transferring")),
        *(worker["kv"][name] for name in ("used", "held", "quarantined")),
    ]
