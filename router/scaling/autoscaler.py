"""Keeps the plan of one router up to date, and shows it.

    once a second: look at the workers ──► decide ──► targets, for whoever starts and stops workers

Before the workers that there should be are known nothing is wished for.
"""

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from router.scaling.config import ScalingConfig
from router.scaling.meter import LoadMeter
from router.scaling.policy import PoolPlan, ScalingPlan, begin, decide
from router.worker_view import DECODE, PREFILL

_LOGGER = logging.getLogger(__name__)


class Wish(NamedTuple):
    """Workers that a pool should have."""

    target: int
    is_floor: bool  # at least: there may be more, of whom nothing is known yet


class Autoscaler:
    """Owns the plan. Invariant: a target lies within its pool's bounds."""

    def __init__(
        self,
        config: ScalingConfig,
        meter: LoadMeter,
        *,
        is_ready: Callable[[], bool],  # whether requests can be served
        now: Callable[[], float],
    ) -> None:
        self._config = config
        self._meter = meter
        self._is_ready = is_ready
        self._now = now
        self._plan: ScalingPlan | None = None

    def tick(self, *, queued_requests: int, queued_tokens: int) -> Mapping[str, Wish]:
        """Look and decide; what is wished for each scaled pool, by its name."""
        now_s = self._now()
        load = self._meter.look(now_s, queued_requests=queued_requests, queued_tokens=queued_tokens)
        if self._plan is None:
            if not self._is_ready():
                return {}
            numbers = {PREFILL: load.prefill.num_workers, DECODE: load.decode.num_workers}
            self._plan = begin(self._config, numbers, now_s=now_s)
        before, self._plan = self._plan, decide(load, self._plan, self._config)
        for name, pool in self._plan.pools.items():
            if pool.target != before.pools[name].target:
                _LOGGER.info(
                    "%s: %d workers instead of %d: %s",
                    name,
                    pool.target,
                    before.pools[name].target,
                    pool.reason,
                )
        return {name: self._wish(name, pool, now_s) for name, pool in self._plan.pools.items()}

    def _wish(self, name: str, pool: PoolPlan, now_s: float) -> Wish:
        scaling = self._config.pool(name)
        assert scaling is not None, name
        return Wish(pool.target, is_floor=not pool.is_settled(scaling, now_s))

    def status(self) -> dict[str, object]:
        """For `/v1/status`: each scaled pool's target, and why."""
        if self._plan is None:
            return {}
        return {name: self._describe(name, pool) for name, pool in self._plan.pools.items()}

    def _describe(self, name: str, pool: PoolPlan) -> dict[str, object]:
        scaling = self._config.pool(name)
        assert scaling is not None, name
        return {
            "target": pool.target,
            "serving": self._meter.num_serving(name),
            "min": scaling.min,
            "max": scaling.max,
            "demand": round(pool.demand, 2),
            "reason": pool.reason,
            "since_s": self._now() - pool.since_s,
            "signal": pool.signal,
        }
