"""A simulated cluster: workers, links, routers, and the requests of a trace through them."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.block_name import BlockName
from router.worker_view import DECODE, PREFILL, WorkerKey
from rpc.feed_pace import FeedPace
from sim.agenda import Agenda
from sim.flight import Flight
from sim.front import Front
from sim.hardware import Hardware
from sim.policies import make_policy
from sim.trace import Trace
from sim.worker import SimWorker, link_all

LOST_S = 0.001  # until a broken connection is noticed
IDLE_LOOK_S = 0.25  # a worker that drains looks so often whether it may end
STUCK_S = 600.0  # without an arrival or an end, while nobody works


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A worker's process dies; another one takes its place after `Hardware.restart_s`."""

    worker_id: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """What is simulated."""

    num_prefill: int
    num_decode: int
    hardware: Hardware
    block_size: int = 512  # tokens; the trace's own is the fastest to simulate
    max_links: int = 16  # of a decode worker
    num_routers: int = 1
    local_prefill: str = "auto"
    kills: Sequence[Kill] = ()
    pace: FeedPace = field(default_factory=FeedPace)

    def __post_init__(self) -> None:
        """Refuse what cannot serve."""
        if self.num_decode < 1 or self.num_prefill < 0:
            raise ValueError(
                f"Got {self.num_prefill} prefill and {self.num_decode} decode workers "
                "but expected at least one decode worker"
            )
        if self.local_prefill == "never" and self.num_prefill < 1:
            raise ValueError(
                f"Got {self.num_prefill} prefill workers and {self.local_prefill = } "
                "but then nobody computes prompts: expected at least one, or 'auto'"
            )
        names = {f"{PREFILL}-{n}" for n in range(self.num_prefill)}
        names |= {f"{DECODE}-{n}" for n in range(self.num_decode)}
        for kill in self.kills:
            if kill.worker_id not in names:
                raise ValueError(f"Got no worker {kill.worker_id!r} to kill, such as decode-0")
            if not (0.0 <= kill.at_s < float("inf")):
                raise ValueError(f"Got {kill.at_s = } but expected 0 or more seconds")

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output of the longest request that any worker can hold."""
        num_kv_tokens = self.hardware.num_kv_tokens // self.block_size * self.block_size
        return min(self.hardware.max_model_len, num_kv_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came of a trace under one policy."""

    policy: str
    flights: Sequence[Flight]
    workers: Sequence[SimWorker]  # those that died too
    fronts: Sequence[Front]
    duration_s: float  # simulated, first arrival to last end


class SimCluster:
    """Owns the agenda and all that lives on it."""

    def __init__(self, spec: ClusterSpec, policy: str, *, seed: int = 1) -> None:
        self._spec = spec
        self._policy = policy
        self.agenda = Agenda()
        self._num_open = 0
        self._moved_at_s = 0.0
        self._num_grown = 0
        self._serving: dict[str, SimWorker] = {}
        self.workers: list[SimWorker] = []
        self.fronts = [self._make_front(random.Random(seed + n)) for n in range(spec.num_routers)]
        for number in range(spec.num_prefill):
            self._start(WorkerKey(f"{PREFILL}-{number}", 1), PREFILL)
        for number in range(spec.num_decode):
            self._start(WorkerKey(f"{DECODE}-{number}", 1), DECODE)
        link_all(self._pool(DECODE), self._pool(PREFILL), spec.max_links)
        for worker in self.workers:
            self._announce(worker)

    def run(self, trace: Trace) -> Run:
        """Send the trace through; returns when every request has ended."""
        namer = BlockNamer(trace, self._spec.block_size)
        flights = [
            Flight(request=request, names=namer.names(number))
            for number, request in enumerate(trace.requests)
        ]
        possible = [flight for flight in flights if self._could_hold(flight)]
        if not possible:
            raise ValueError(f"no request of {trace.name} fits: {flights[0].error}")
        self._num_open = len(possible)
        for flight, front in zip(possible, itertools.cycle(self.fronts), strict=False):
            self._plan_arrival(flight, front)
        self._moved_at_s = possible[-1].request.arrived_s
        self._look_for_progress()
        for kill in self._spec.kills:
            self.agenda.at(kill.at_s, lambda kill=kill: self.kill(kill.worker_id))  # type: ignore[misc]
        self.agenda.run(lambda: self._num_open == 0)
        return Run(
            policy=self._policy,
            flights=flights,
            workers=self.workers,
            fronts=self.fronts,
            duration_s=self.agenda.now_s,
        )

    def kill(self, worker_id: str) -> None:
        """Its process is gone at once, with all it had."""
        worker = self._serving.pop(worker_id, None)
        if worker is None:
            return  # dead already
        worker.die()
        for front in self.fronts:
            self.agenda.after(LOST_S, lambda front=front: front.lose(worker.key))  # type: ignore[misc]
        self.agenda.after(self._spec.hardware.restart_s, lambda: self._restart(worker))

    # Pools that grow and shrink.

    def serving(self, pool: str) -> list[SimWorker]:
        """Workers of a pool that take requests, the oldest first."""
        return [worker for worker in self._pool(pool) if not worker.is_draining]

    def grow(self, pool: str, *, asked_for_s: float) -> None:
        """One worker more serves from now on."""
        number = self._num_grown = self._num_grown + 1
        worker = self._start(WorkerKey(f"{pool}-new-{number}", 1), pool)
        worker.asked_for_s = asked_for_s
        self._relink()
        self._announce(worker)

    def shrink(self, worker: SimWorker) -> None:
        """It takes nothing new, and ends with the last that it has."""
        worker.drain()
        self._relink()
        self._end_when_idle(worker)

    def _end_when_idle(self, worker: SimWorker) -> None:
        if self._serving.get(worker.key.worker_id) is not worker:
            return  # it died meanwhile
        if not worker.is_idle:
            self.agenda.after(IDLE_LOOK_S, lambda: self._end_when_idle(worker))
            return
        del self._serving[worker.key.worker_id]
        worker.die()
        for front in self.fronts:
            self.agenda.after(LOST_S, lambda front=front: front.lose(worker.key))  # type: ignore[misc]

    def _relink(self) -> None:
        link_all(self.serving(DECODE), self.serving(PREFILL), self._spec.max_links)

    def _restart(self, dead: SimWorker) -> None:
        key = WorkerKey(dead.key.worker_id, dead.key.incarnation + 1)
        worker = self._start(key, dead.pool)
        worker.asked_for_s = dead.agenda.now_s - self._spec.hardware.restart_s
        worker.peers = [self._serving.get(p.key.worker_id, p) for p in dead.peers]
        for other in self._serving.values():
            other.peers = [worker if peer is dead else peer for peer in other.peers]
        self._announce(worker)

    def _start(self, key: WorkerKey, pool: str) -> SimWorker:
        worker = SimWorker(
            key,
            pool,
            self._spec.hardware,
            self.agenda,
            block_size=self._spec.block_size,
            pace=self._spec.pace,
        )
        self._serving[key.worker_id] = worker
        self.workers.append(worker)
        return worker

    def _announce(self, worker: SimWorker) -> None:
        for front in self.fronts:
            front.follow(worker)

    def _pool(self, pool: str) -> list[SimWorker]:
        return [worker for worker in self._serving.values() if worker.pool == pool]

    def _make_front(self, rng: random.Random) -> Front:
        spec = self._spec
        return Front(
            make_policy(self._policy, rng, local_prefill=spec.local_prefill),
            self.agenda,
            rng=rng,
            rpc_latency_s=spec.hardware.rpc_latency_s,
            on_end=self._flight_ended,
        )

    def _plan_arrival(self, flight: Flight, front: Front) -> None:
        self.agenda.at(flight.request.arrived_s, lambda: front.submit(flight))

    def _flight_ended(self, flight: Flight) -> None:
        del flight
        self._num_open -= 1
        self._moved_at_s = max(self._moved_at_s, self.agenda.now_s)

    def _could_hold(self, flight: Flight) -> bool:
        """Refuse at once what would wait for ever, as a router does."""
        longest, num_tokens = self._spec.max_request_tokens, flight.request.num_tokens
        if num_tokens > longest:
            flight.error = f"{num_tokens} tokens are more than the {longest} that a worker can hold"
        return not flight.error

    def _look_for_progress(self) -> None:
        is_idle = all(worker.is_idle for worker in self._serving.values())
        if is_idle and self.agenda.now_s - self._moved_at_s > STUCK_S:
            raise ValueError(
                f"{self._num_open} requests wait, and no worker took one for {STUCK_S:.0f} s of "
                "simulated time: is a killed worker's restart_s too long?"
            )
        self.agenda.after(STUCK_S, self._look_for_progress)

    def check_integrity(self) -> None:
        """After a run: no worker has anything left of a request, no router counts any."""
        for worker in self._serving.values():
            worker.engine.check_integrity()
            assert worker.engine.num_seqs == 0, worker.key
            assert worker.engine.cache.num_used == 0, worker.key
            assert worker.num_transferring == 0, worker.key
        for front in self.fronts:
            assert front.num_waiting == 0
            for state in front.fleet.states.values():
                assert not state.attempts, state.key
                assert state.num_picks == 0, state.key


class BlockNamer:
    """Gives each block of a trace its name in the workers' block size."""

    def __init__(self, trace: Trace, block_size: int) -> None:
        if block_size < 1 or trace.block_tokens % block_size:
            raise ValueError(
                f"Got block size {block_size} but expected a divisor of the trace's "
                f"{trace.block_tokens}"
            )
        self._trace = trace
        self._block_size = block_size
        self._num_parts = trace.block_tokens // block_size
        self._names: dict[int, list[BlockName]] = {}
        self._unshared = itertools.count(1 << 60)

    def names(self, number: int) -> list[BlockName]:
        """Names of the full blocks of a request's prompt."""
        request = self._trace.requests[number]
        num_blocks = request.num_prompt_tokens // self._block_size
        if not request.block_ids:
            return [_name(next(self._unshared)) for _ in range(num_blocks)]
        names: list[BlockName] = []
        for block_id in request.block_ids:
            if block_id not in self._names:
                first = block_id * self._num_parts
                self._names[block_id] = [_name(first + n) for n in range(self._num_parts)]
            names += self._names[block_id]
        return names[:num_blocks]


def _name(number: int) -> BlockName:
    """Spread like a digest: Python's hash of small ints would lie too well."""
    mixed = number * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & 0xFFFFFFFFFFFFFFFF
    return BlockName((mixed ^ mixed >> 32) >> 4)
