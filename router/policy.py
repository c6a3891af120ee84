"""Filter, Scorer, Picker: which workers serve a request. Plain data in, a decision out."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from router.cost import Cost, Need, local_cost, pair_cost
from router.worker_view import WorkerKey, WorkerView

# Late binding: beyond two full batches on a worker, a request waits where it can still go anywhere.
MAX_BATCHES_AHEAD = 2
# Costs this close are equal: the estimate is no better.
TIE_SHARE = 0.05
TIE_S = 0.0001


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """Leading tokens of a request one worker holds."""

    num_tokens: int = 0  # with predicted entries
    num_confirmed_tokens: int = 0  # as the worker itself told


NO_HIT = Hit()


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """One request as the policy sees it."""

    num_tokens: int
    num_output_tokens: int
    hits: Mapping[WorkerKey, Hit] = field(default_factory=dict)
    excluded: frozenset[WorkerKey] = frozenset()  # avoided while anyone else can do it

    def hit(self, worker: WorkerView | None) -> Hit:
        """What this worker holds of the request."""
        return self.hits.get(worker.key, NO_HIT) if worker is not None else NO_HIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A decode worker, and the prefill worker that feeds it; None: it prefills itself."""

    prefill: WorkerView | None
    decode: WorkerView

    @property
    def workers(self) -> tuple[WorkerView, ...]:
        """All of them."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredChoice:
    """A choice and what it costs."""

    choice: Choice
    cost: Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was picked, and the best of the others."""

    chosen: ScoredChoice
    next_best: ScoredChoice | None
    num_choices: int
    hits: Mapping[WorkerKey, Hit] = field(default_factory=dict)  # of all workers

    def hit(self, worker: WorkerView) -> Hit:
        """What this worker held of the request."""
        return self.hits.get(worker.key, NO_HIT)


class Filter(Protocol):
    """Keeps the workers that may be taken; never raises, never adds."""

    def __call__(self, request: RouteRequest, workers: Sequence[WorkerView]) -> list[WorkerView]:
        """Return the kept ones in order."""
        ...


class Scorer(Protocol):
    """Costs a choice in seconds, lower is better; changes nothing."""

    def __call__(self, request: RouteRequest, choice: Choice) -> Cost:
        """Return every term."""
        ...


class Picker(Protocol):
    """Takes one of at least one scored choices."""

    def __call__(self, scored: Sequence[ScoredChoice]) -> Decision:
        """Return it with the runner-up."""
        ...


def list_choices(
    prefill: Sequence[WorkerView], decode: Sequence[WorkerView], *, local_prefill: str
) -> list[Choice]:
    """Every choice `local_prefill` allows among workers that may be routed to."""
    takers = [worker for worker in decode if worker.is_routable]
    feeders = [worker for worker in prefill if worker.is_routable]
    pairs = [Choice(prefill=p, decode=d) for d in takers for p in feeders if p.key in d.links]
    if local_prefill == "never" or (local_prefill == "fallback" and pairs):
        return pairs
    return pairs + [Choice(prefill=None, decode=worker) for worker in takers]


def keep_fitting(request: RouteRequest, workers: Sequence[WorkerView]) -> list[WorkerView]:
    """Drop workers whose whole pool is too small."""
    return [worker for worker in workers if worker.could_hold(request.num_tokens)]


def keep_with_room(request: RouteRequest, workers: Sequence[WorkerView]) -> list[WorkerView]:
    """Drop workers that just refused, or that have two batches already."""
    del request
    return [worker for worker in workers if not _is_full(worker)]


def score_by_time(request: RouteRequest, choice: Choice) -> Cost:
    """Apply the joint cost formula."""
    need = Need(
        num_tokens=request.num_tokens,
        num_output_tokens=request.num_output_tokens,
        num_cached_prefill=request.hit(choice.prefill).num_tokens,
        num_cached_decode=request.hit(choice.decode).num_tokens,
    )
    if choice.prefill is None:
        return local_cost(need, choice.decode)
    return pair_cost(need, choice.prefill, choice.decode, choice.decode.links[choice.prefill.key])


class CheapestPicker:
    """Takes the cheapest choice; a coin decides among those about as cheap, against herding."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, scored: Sequence[ScoredChoice]) -> Decision:
        """Pick; `scored` must not be empty."""
        ranked = sorted(scored, key=lambda entry: entry.cost.total_s)
        limit_s = ranked[0].cost.total_s * (1 + TIE_SHARE) + TIE_S
        chosen = self._rng.choice([entry for entry in ranked if entry.cost.total_s <= limit_s])
        others = [entry for entry in ranked if entry is not chosen]
        return Decision(
            chosen=chosen, next_best=others[0] if others else None, num_choices=len(ranked)
        )


FILTERS: tuple[Filter, ...] = (keep_fitting, keep_with_room)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The three put together."""

    local_prefill: str
    picker: Picker
    filters: tuple[Filter, ...] = FILTERS
    scorer: Scorer = score_by_time

    def pick(
        self, request: RouteRequest, prefill: Sequence[WorkerView], decode: Sequence[WorkerView]
    ) -> Decision | None:
        """Decide, or return None while no choice exists."""
        for keep in self.filters:
            prefill, decode = keep(request, prefill), keep(request, decode)
        choices = self._list_choices(prefill, decode, request.excluded)
        if not choices and request.excluded:
            choices = self._list_choices(prefill, decode, frozenset())
        if not choices:
            return None
        scored = [ScoredChoice(choice=c, cost=self.scorer(request, c)) for c in choices]
        return replace(self.picker(scored), hits=request.hits)

    def _list_choices(
        self,
        prefill: Sequence[WorkerView],
        decode: Sequence[WorkerView],
        excluded: frozenset[WorkerKey],
    ) -> list[Choice]:
        return list_choices(
            [worker for worker in prefill if worker.key not in excluded],
            [worker for worker in decode if worker.key not in excluded],
            local_prefill=self.local_prefill,
        )


def _is_full(worker: WorkerView) -> bool:
    limit = MAX_BATCHES_AHEAD * max(worker.max_num_seqs, 1)
    return worker.has_refused or worker.num_requests >= limit
