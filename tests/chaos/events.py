"""What can happen to a live cluster."""

import asyncio
import time
from dataclasses import dataclass

import grpc.aio
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.chaos.cluster import WHOLE_WITHIN_S, Fault, Worker
from tests.chaos.load import Answer, ask
from tests.chaos.scenario import STRUCK, Stage

FLOWS_WITHIN_S = 60.0


def fault(point: str, action: str, **fields: object) -> Fault:
    """One entry of a fault plan; of a request with this label, of a pool, of a worker."""
    match = {key: fields.pop(key) for key in ("pool", "worker", "request_label") if key in fields}
    return {"point": point, "action": action, "match": match, **fields}


@dataclass(frozen=True, slots=True)
class Wait:
    """Time passes."""

    duration_s: float

    async def happen(self, stage: Stage) -> None:
        await asyncio.sleep(self.duration_s)


@dataclass(frozen=True, slots=True)
class Flow:
    """Wait until this many more events of streams have arrived at their clients."""

    num_events: int = 40

    async def happen(self, stage: Stage) -> None:
        before, end_s = _num_arrived(stage), time.monotonic() + FLOWS_WITHIN_S
        while _num_arrived(stage) < before + self.num_events:
            assert time.monotonic() < end_s, "no stream flows"
            await asyncio.sleep(0.01)


def _num_arrived(stage: Stage) -> int:
    return sum(len(answer.arrivals_s) for answer in stage.answers)


@dataclass(frozen=True, slots=True)
class Moved:
    """Wait until a stream went on with another worker: how long that takes is not ours to know."""

    async def happen(self, stage: Stage) -> None:
        end_s = time.monotonic() + FLOWS_WITHIN_S
        while not stage.affected:
            assert time.monotonic() < end_s, "no stream moved"
            await asyncio.sleep(0.1)
            await stage.note_routes()


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to the busiest worker of a pool."""

    pool: str

    async def happen(self, stage: Stage) -> None:
        victim = await busiest(stage, self.pool)
        stage.strike(victim)
        stage.cluster.kill(victim["pid"])


@dataclass(frozen=True, slots=True)
class Freeze:
    """SIGSTOP to the busiest worker of a pool."""

    pool: str

    async def happen(self, stage: Stage) -> None:
        victim = await busiest(stage, self.pool)
        stage.strike(victim)
        stage.cluster.freeze(victim["pid"])


@dataclass(frozen=True, slots=True)
class Thaw:
    """SIGCONT to whatever stands still, also by a fault of its own."""

    async def happen(self, stage: Stage) -> None:
        for worker in (await stage.cluster.status())["workers"]:
            stage.cluster.frozen.add(worker["pid"])
        stage.cluster.thaw()


@dataclass(frozen=True, slots=True)
class Partition:
    """Every control message from and to the busiest worker of a pool is lost."""

    pool: str

    async def happen(self, stage: Stage) -> None:
        victim = await busiest(stage, self.pool)
        stage.strike(victim)
        lost = fault("control_message", "drop", worker=victim["id"], count=0)
        stage.cluster.strike("partition", lost)


@dataclass(frozen=True, slots=True)
class Mend:
    """The partition is over."""

    async def happen(self, stage: Stage) -> None:
        stage.cluster.lift("partition")


class Strike:
    """These faults are in force until the end of the scenario."""

    def __init__(self, *faults: Fault) -> None:
        self._faults = faults

    async def happen(self, stage: Stage) -> None:
        stage.cluster.strike(STRUCK, *self._faults)


@dataclass(frozen=True, slots=True)
class Slow:
    """Each step of a pool takes this much longer, so that streams can be caught half way."""

    pool: str = "decode"
    delay_s: float = 0.01

    async def happen(self, stage: Stage) -> None:
        slow = fault(f"{self.pool}_step", "delay", pool=self.pool, count=0, delay_s=self.delay_s)
        stage.cluster.strike(f"slow-{self.pool}", slow)


@dataclass(frozen=True, slots=True)
class Ask:
    """One more request, with a label of its own, to its end."""

    question: str
    label: str
    num_tokens: int = 60

    async def happen(self, stage: Stage) -> None:
        answer = Answer(self.question, self.num_tokens, self.label)
        stage.extra.append(answer)
        await ask(stage.cluster.http, answer)


@dataclass(frozen=True, slots=True)
class KillCacheOf:
    """SIGKILL to the prefill worker that the last answer to this question came from."""

    question: str

    async def happen(self, stage: Stage) -> None:
        await stage.note_routes()
        answer = next(each for each in reversed(stage.extra) if each.question == self.question)
        victim = await stage.cluster.worker(
            stage.first_routes[answer.request_id]["chosen"]["prefill"]
        )
        stage.strike(victim)
        stage.cluster.kill(victim["pid"])


@dataclass(frozen=True, slots=True)
class Replaced:
    """Wait until a worker's place is taken by a newer process."""

    worker_id: str

    async def happen(self, stage: Stage) -> None:
        before = next(each for each in stage.workers if each["id"] == self.worker_id)
        end_s = time.monotonic() + WHOLE_WITHIN_S
        while True:
            worker = await stage.cluster.worker(self.worker_id)
            if worker["state"] == "ready" and worker["incarnation"] > before["incarnation"]:
                return
            assert time.monotonic() < end_s, f"{self.worker_id} did not come back: {worker}"
            await asyncio.sleep(0.2)


@dataclass(frozen=True, slots=True)
class NotReady:
    """Wait until both faces say that no request can be served; the process itself is well."""

    within_s: float = 10.0

    async def happen(self, stage: Stage) -> None:
        await _until_ready_is(stage, is_ready=False, within_s=self.within_s)
        response = await stage.cluster.http.get("/health")
        assert response.status_code == httpx.codes.OK


@dataclass(frozen=True, slots=True)
class Ready:
    """Wait until both faces say that requests are served."""

    async def happen(self, stage: Stage) -> None:
        await _until_ready_is(stage, is_ready=True, within_s=WHOLE_WITHIN_S)


async def _until_ready_is(stage: Stage, *, is_ready: bool, within_s: float) -> None:
    address = f"127.0.0.1:{stage.cluster.served.grpc_port}"
    end_s = time.monotonic() + within_s
    statuses = health_pb2.HealthCheckResponse
    wanted = statuses.SERVING if is_ready else statuses.NOT_SERVING
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            response = await stage.cluster.http.get("/ready")
            verdict = await stub.Check(health_pb2.HealthCheckRequest())
            if response.is_success is is_ready and verdict.status == wanted:
                return
            assert time.monotonic() < end_s, (response.text, verdict)
            await asyncio.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Whole:
    """Wait until every worker is ready and linked."""

    async def happen(self, stage: Stage) -> None:
        await stage.cluster.until_whole()


async def busiest(stage: Stage, pool: str) -> Worker:
    """The ready worker with the most to do; by lot among equals."""
    workers = await stage.cluster.workers(pool)
    assert workers, f"no {pool} worker is ready"
    return max(workers, key=lambda worker: (_work(worker), stage.rng.random()))


def _work(worker: Worker) -> int:
    return int(worker["running"] + worker["waiting"] + worker["transferring"])
