"""What a prompt token costs on workers that computed some lately, and how others drift towards it.

A worker's rate is as old as its last prompt. Workers that start together on few cores measure each
other, and an idle one would keep that figure: nobody sends it the prompt that would correct it. So
an old rate counts less and less against what its pool does now.

What a step's requests and KV cost is likewise that of the pool while a worker cannot tell: to one
that reports 0 everything would be sent, and it would learn too late.
"""

from statistics import median
from typing import NamedTuple

from router.worker_view import WorkerKey

FRESH_S = 30.0
HALF_LIFE_S = 30.0


class StepCost(NamedTuple):
    """What makes a step longer; 0 while unknown."""

    request_s: float
    kv_token_s: float


UNKNOWN_COST = StepCost(0.0, 0.0)


class TypicalRates:
    """Last rate and its age of each worker. Invariant: lost workers have none."""

    def __init__(self) -> None:
        self._rates: dict[WorkerKey, tuple[str, float, float]] = {}
        self._typical: dict[str, float] = {}
        self._num_news = 0
        self._step_costs: dict[WorkerKey, tuple[str, StepCost]] = {}

    def step_cost(self, pool: str, told: StepCost) -> StepCost:
        """What to believe of a worker that told this."""
        if told.kv_token_s > 0.0:
            return told
        known = [cost for each, cost in self._step_costs.values() if each == pool]
        if not known:
            return told
        return StepCost(
            median(cost.request_s for cost in known), median(cost.kv_token_s for cost in known)
        )

    def learn(
        self,
        key: WorkerKey,
        pool: str,
        tokens_per_s: float,
        age_s: float,
        step_cost: StepCost = UNKNOWN_COST,
    ) -> None:
        """A worker told its rate, that old, and what makes its steps longer."""
        self._rates[key] = (pool, tokens_per_s, age_s)
        self._num_news += 1
        if step_cost.kv_token_s > 0.0:
            self._step_costs[key] = (pool, step_cost)

    def forget(self, key: WorkerKey) -> None:
        """It is lost."""
        self._step_costs.pop(key, None)
        if self._rates.pop(key, None) is not None:
            self._num_news = len(self._rates) + 1

    def current(self, pool: str, tokens_per_s: float, age_s: float) -> float:
        """What to believe of a worker that told this rate."""
        typical = self._of(pool)
        if not typical or not tokens_per_s or age_s <= 0.0:
            return tokens_per_s
        share = 0.5 ** (age_s / HALF_LIFE_S)
        return float(tokens_per_s**share * typical ** (1.0 - share))

    def _of(self, pool: str) -> float:
        # A median over all workers is not worth making anew for each single message.
        if self._num_news * 4 >= len(self._rates):
            self._num_news = 0
            fresh = [(p, rate) for p, rate, age_s in self._rates.values() if age_s < FRESH_S]
            self._typical = {
                p: median(rate for each, rate in fresh if each == p) for p in {p for p, _ in fresh}
            }
        # A pool in which nothing is fresh learns from the other: it runs the same model.
        return self._typical.get(pool) or max(self._typical.values(), default=0.0)
