"""Who decides how many workers a simulated cluster has, and who makes it so.

`TokenSignals` is the router's own autoscaler; `OngoingRequests` is what Ray Serve does unless told
otherwise, pool by pool (`ray.serve.autoscaling_policy`, Ray 2.60): requests that run or wait over a
target for each worker, averaged, and a change only after it was wanted all through a delay.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from router.scaling.autoscaler import Autoscaler
from router.scaling.config import ScalingConfig
from router.scaling.meter import LoadMeter
from router.worker_view import DECODE, PREFILL
from sim.cluster import SimCluster
from sim.worker import SimWorker

TICK_S = 1.0
POOLS = (PREFILL, DECODE)


class Scaler(Protocol):
    """Says once a second how many workers each pool should have."""

    def targets(self, cluster: SimCluster) -> Mapping[str, int]:
        """By pool; a pool that is left out stays as it is."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSignals:
    """Makes the router's autoscaler for a cluster."""

    config: ScalingConfig
    name: str = "relevo"

    def make(self, cluster: SimCluster) -> Scaler:
        """A fresh one."""
        return _TokenScaler(self.config, cluster)


class _TokenScaler:
    def __init__(self, config: ScalingConfig, cluster: SimCluster) -> None:
        self._autoscaler = Autoscaler(
            config,
            LoadMeter(cluster.fronts[0].fleet),
            is_ready=lambda: True,
            now=cluster.agenda.now,
        )

    def targets(self, cluster: SimCluster) -> Mapping[str, int]:
        wishes = self._autoscaler.tick(
            queued_requests=sum(front.num_waiting for front in cluster.fronts),
            queued_tokens=sum(front.num_waiting_tokens for front in cluster.fronts),
        )
        return {pool: wish.target for pool, wish in wishes.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class OngoingRequests:
    """Serve's default policy; bounds and delays are those of `config`, targets are its own."""

    config: ScalingConfig
    target: Mapping[str, float] = field(default_factory=lambda: {PREFILL: 2.0, DECODE: 2.0})
    look_back_s: float = 30.0

    @property
    def name(self) -> str:
        """With its targets."""
        return f"serve {self.target[PREFILL]:g}/{self.target[DECODE]:g}"

    def make(self, cluster: SimCluster) -> Scaler:
        """A fresh one."""
        del cluster
        return _OngoingScaler(self)


class _OngoingScaler:
    def __init__(self, policy: OngoingRequests) -> None:
        self._policy = policy
        self._seen: dict[str, deque[tuple[float, int]]] = {pool: deque() for pool in POOLS}
        self._target: dict[str, int] = {}
        self._wanted: dict[str, tuple[int, float]] = {}  # direction, since when

    def targets(self, cluster: SimCluster) -> Mapping[str, int]:
        return {pool: self._decide(cluster, pool) for pool in POOLS}

    def _decide(self, cluster: SimCluster, pool: str) -> int:
        scaling = self._policy.config.pool(pool)
        serving = cluster.serving(pool)
        now_s = cluster.agenda.now_s
        target = self._target.setdefault(pool, len(serving))
        if scaling is None:
            return target
        seen = self._seen[pool]
        seen.append((now_s, sum(map(_ongoing, serving)) + _queued(cluster)))
        while seen[0][0] < now_s - self._policy.look_back_s:
            seen.popleft()
        mean = sum(number for _, number in seen) / len(seen)
        desired = int(-(-mean // self._policy.target[pool]))
        desired = min(max(desired, scaling.min), scaling.max)
        direction = (desired > target) - (desired < target)
        before, since_s = self._wanted.get(pool, (0, now_s))
        if direction != before:
            since_s = now_s
        self._wanted[pool] = (direction, since_s)
        delay_s = scaling.up_delay_s if direction > 0 else scaling.down_delay_s
        if direction and now_s - since_s >= delay_s:
            self._target[pool] = desired
            self._wanted[pool] = (0, now_s)
        return self._target[pool]


def _ongoing(worker: SimWorker) -> int:
    engine = worker.engine
    in_engine = engine.num_seqs + len(engine.waiting) + len(engine.arrived)
    return (
        max(in_engine, worker.num_transferring)
        if worker.pool == PREFILL
        else (in_engine + worker.num_transferring)
    )


def _queued(cluster: SimCluster) -> int:
    return sum(front.num_waiting for front in cluster.fronts)


class PoolKeeper:
    """Starts and ends workers as a scaler says. Invariant: none is ended that was not serving."""

    def __init__(self, cluster: SimCluster, scaler: Scaler, *, start_s: float) -> None:
        self._cluster = cluster
        self._scaler = scaler
        self._start_s = start_s
        self._num_starting = dict.fromkeys(POOLS, 0)
        self.num_changes = 0
        self.most = {pool: len(cluster.serving(pool)) for pool in POOLS}
        cluster.agenda.after(TICK_S, self._tick)

    def _tick(self) -> None:
        for pool, target in self._scaler.targets(self._cluster).items():
            self._aim(pool, target)
        self._cluster.agenda.after(TICK_S, self._tick)

    def _aim(self, pool: str, target: int) -> None:
        serving = self._cluster.serving(pool)
        number = len(serving) + self._num_starting[pool]
        if target != number:
            self.num_changes += 1
        for _ in range(target - number):
            self._start(pool)
        # The newest first, as Serve does; one that is still starting is waited for.
        surplus = min(number - target, len(serving) - 1)
        for worker in serving[::-1][: max(surplus, 0)]:
            self._cluster.shrink(worker)
        self.most[pool] = max(self.most[pool], target)

    def _start(self, pool: str) -> None:
        asked_s = self._cluster.agenda.now_s
        self._num_starting[pool] += 1

        def serve() -> None:
            self._num_starting[pool] -= 1
            self._cluster.grow(pool, asked_for_s=asked_s)

        self._cluster.agenda.after(self._start_s, serve)
