"""Which number of workers each pool should have: a pure function of a load and the past wishes.

    load ──► demand ──► advice (with a dead band, at most twice the live workers, in bounds)
                          │   kept for down_delay_s
                          ▼
    target   grows to the least advice of the last up_delay_s,
             shrinks to the greatest of the last down_delay_s

Who decides may be younger than the pools: until a plan is down_delay_s old it is not settled. Its
target then follows whoever turns up, and is a floor for those that may still be starting. A pool
without a live worker says nothing of its load, and stays as it is.

So a target that grew does not shrink before down_delay_s have passed, nor the other way round
before up_delay_s have. The pools are judged together: prompts that a growing prefill pool will let
through count as decode demand at once, and no pool shrinks while the other one lacks workers,
since then it is idle because of the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from router.scaling.config import PoolScaling, ScalingConfig
from router.scaling.demand import Demand, decode_demand, prefill_demand
from router.scaling.load import ClusterLoad
from router.worker_view import DECODE, PREFILL

DEAD_BAND = 0.1  # of the target: a demand that is off by less changes nothing
MAX_GROWTH = 2  # times the live workers: what a full pool lacks is not known beyond that


@dataclass(frozen=True, slots=True)
class Advice:
    """What would be right if nothing but this moment counted."""

    at_s: float
    num_workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """One pool's target and how it came about. Invariant: `advice` are in order of time."""

    target: int
    since_s: float  # the target is this one
    began_s: float  # advice are known from here on
    demand: float = 0.0
    reason: str = ""  # of the present target
    signal: str = ""  # the strongest one now
    advice: tuple[Advice, ...] = ()

    def is_settled(self, scaling: PoolScaling, now_s: float) -> bool:
        """Whether the target may be less than there are."""
        return now_s - self.began_s >= scaling.down_delay_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPlan:
    """Both pools; a pool that is not scaled has no plan."""

    pools: Mapping[str, PoolPlan] = field(default_factory=dict)


def begin(config: ScalingConfig, num_workers: Mapping[str, int], *, now_s: float) -> ScalingPlan:
    """The first plan: what is there, within the bounds."""
    pools: dict[str, PoolPlan] = {}
    for name in (PREFILL, DECODE):
        if (scaling := config.pool(name)) is not None:
            target = _clamp(num_workers[name], scaling)
            pools[name] = PoolPlan(
                target=target, since_s=now_s, began_s=now_s, reason="what there was at the start"
            )
    return ScalingPlan(pools=pools)


def decide(load: ClusterLoad, plan: ScalingPlan, config: ScalingConfig) -> ScalingPlan:
    """The plan of this moment. Depends on its arguments alone."""
    live = {PREFILL: load.prefill.num_workers, DECODE: load.decode.num_workers}
    demands = _demands(load, config)
    scalings = {name: config.pool(name) for name in plan.pools}
    # One that has all it may have will not be helped by waiting for more.
    lacking = {
        name
        for name, scaling in scalings.items()
        if scaling is not None
        and live[name] < scaling.max
        and demands[name].workers > live[name] + _band(1)
    }
    pools: dict[str, PoolPlan] = {}
    for name, pool in plan.pools.items():
        scaling = scalings[name]
        assert scaling is not None, name
        is_kept = bool(lacking - {name})
        pools[name] = _next(
            pool, scaling, demands[name], live=live[name], is_kept=is_kept, now_s=load.now_s
        )
    return ScalingPlan(pools=pools)


def _demands(load: ClusterLoad, config: ScalingConfig) -> dict[str, Demand]:
    demands: dict[str, Demand] = {}
    growth = 1.0
    if config.prefill is not None:
        demands[PREFILL] = prefill = prefill_demand(load, config.prefill)
        growth = prefill.workers / max(load.prefill.num_workers, 1)
        most = config.prefill.max / max(load.prefill.num_workers, 1)
        growth = min(max(growth, 1.0), max(most, 1.0), float(MAX_GROWTH))
    if config.decode is not None:
        decode = decode_demand(load, config.decode)
        if growth > 1.0:
            reason = f"{decode.reason}; prefill lets {growth:.1f} times as many through"
            decode = Demand(workers=decode.workers * growth, reason=reason)
        demands[DECODE] = decode
    return demands


def _next(
    pool: PoolPlan,
    scaling: PoolScaling,
    demand: Demand,
    *,
    live: int,
    is_kept: bool,
    now_s: float,
) -> PoolPlan:
    turned_up = 0 if pool.is_settled(scaling, now_s) else min(live, scaling.max)
    is_following = turned_up > pool.target
    if is_following:
        pool = replace(pool, target=turned_up, since_s=now_s)
    advised = _advise(pool.target, scaling, demand, live=live) if live else pool.target
    # What was advised before they turned up, or by one moment of them, lets none of them go.
    if is_kept or is_following:
        advised = max(advised, pool.target)
    oldest_s = now_s - max(scaling.up_delay_s, scaling.down_delay_s)
    advice = (*(each for each in pool.advice if each.at_s >= oldest_s), Advice(now_s, advised))
    pool = replace(pool, advice=advice, demand=demand.workers, signal=demand.reason)
    target = _settle(pool, scaling, now_s)
    if target == pool.target:
        return pool
    return replace(pool, target=target, since_s=now_s, reason=demand.reason)


def _advise(target: int, scaling: PoolScaling, demand: Demand, *, live: int) -> int:
    band = _band(target)
    if demand.workers > target + band:
        most = max(target, MAX_GROWTH * max(live, 1))
        return _clamp(min(_ceil(demand.workers - band), most), scaling)
    return _clamp(min(_ceil(demand.workers + band), target), scaling)


def _settle(pool: PoolPlan, scaling: PoolScaling, now_s: float) -> int:
    def since(delay_s: float) -> list[int]:
        return [each.num_workers for each in pool.advice if each.at_s >= now_s - delay_s]

    if now_s - pool.began_s >= scaling.up_delay_s:
        least = min(since(scaling.up_delay_s))
        if least > pool.target:
            return least
    if pool.is_settled(scaling, now_s):
        greatest = max(since(scaling.down_delay_s))
        if greatest < pool.target:
            return greatest
    return pool.target


def _band(target: int) -> float:
    return DEAD_BAND * target


def _ceil(workers: float) -> int:
    return int(-(-workers // 1))


def _clamp(num_workers: int, scaling: PoolScaling) -> int:
    return min(max(num_workers, scaling.min), scaling.max)
