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
    """What each worker told last, and what is typical of its pool. Invariant: lost workers have
    told nothing.
    """

    def __init__(self) -> None:
        self._told: dict[WorkerKey, _Told] = {}
        self._num_news = 0
        self._rates: dict[str, float] = {}
        self._step_costs: dict[str, StepCost] = {}

    def step_cost(self, pool: str, told: StepCost) -> StepCost:
        """What to believe of a worker that told this."""
        if told.kv_token_s > 0.0:
            return told
        self._settle()
        return self._step_costs.get(pool, told)

    def learn(
        self,
        key: WorkerKey,
        pool: str,
        tokens_per_s: float,
        age_s: float,
        step_cost: StepCost = UNKNOWN_COST,
    ) -> None:
        """A worker told its rate, that old, and what makes its steps longer."""
        if step_cost.kv_token_s <= 0.0 and (before := self._told.get(key)) is not None:
            step_cost = before.step_cost
        self._told[key] = _Told(pool, tokens_per_s, age_s, step_cost)
        self._num_news += 1

    def forget(self, key: WorkerKey) -> None:
        """It is lost."""
        if self._told.pop(key, None) is not None:
            self._num_news = len(self._told) + 1

    def current(self, pool: str, tokens_per_s: float, age_s: float) -> float:
        """What to believe of a worker that told this rate."""
        if not tokens_per_s or age_s <= 0.0:
            return tokens_per_s
        self._settle()
        # A pool in which nothing is fresh learns from the other: it runs the same model.
        typical = self._rates.get(pool) or max(self._rates.values(), default=0.0)
        if not typical:
            return tokens_per_s
        share = 0.5 ** (age_s / HALF_LIFE_S)
        return float(tokens_per_s**share * typical ** (1.0 - share))

    def _settle(self) -> None:
        # Medians over all workers are not worth making anew for each single message.
        if self._num_news * 4 < len(self._told) or not self._num_news:
            return
        self._num_news = 0
        self._rates, self._step_costs = {}, {}
        for pool in {told.pool for told in self._told.values()}:
            all_told = [told for told in self._told.values() if told.pool == pool]
            if fresh := [told.tokens_per_s for told in all_told if told.age_s < FRESH_S]:
                self._rates[pool] = median(fresh)
            known = [told.step_cost for told in all_told if told.step_cost.kv_token_s > 0.0]
            if known:
                self._step_costs[pool] = StepCost(
                    median(cost.request_s for cost in known),
                    median(cost.kv_token_s for cost in known),
                )


class _Told(NamedTuple):
    pool: str
    tokens_per_s: float
    age_s: float
    step_cost: StepCost  # the last that was known
