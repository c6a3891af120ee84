"""Filter, Scorer, Picker: which workers serve a request. Plain data in, a decision out."""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from router.cost import Cost, Need
from router.prefix_index import CachedTokens
from router.worker_view import Pools, WorkerKey, WorkerView

# Costs this close are equal: the estimate is no better.
TIE_SHARE = 0.05
TIE_S = 0.0001


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """One request as the policy sees it."""

    num_tokens: int
    num_output_tokens: int
    num_choices: int = 1
    cached_prefill: CachedTokens = field(default_factory=CachedTokens)
    cached_decode: CachedTokens = field(default_factory=CachedTokens)
    excluded: Collection[WorkerKey] = frozenset()  # avoided while anyone else can do it
    session_workers: Collection[WorkerKey] = frozenset()  # where its session belongs; none: no hint

    @property
    def need(self) -> Need:
        """What it asks of any worker."""
        return Need(
            num_tokens=self.num_tokens,
            num_output_tokens=self.num_output_tokens,
            num_choices=self.num_choices,
        )


class Choice(NamedTuple):
    """A decode worker, and the prefill worker that feeds it; None: it prefills itself."""

    prefill: WorkerView | None
    decode: WorkerView

    @property
    def workers(self) -> tuple[WorkerView, ...]:
        """All of them."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    @property
    def num_requests(self) -> int:
        """Requests that its workers have already."""
        return sum(worker.num_requests for worker in self.workers)


class ScoredChoice(NamedTuple):
    """A choice and what it costs."""

    choice: Choice
    cost: Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was picked, and the best of the others."""

    chosen: ScoredChoice
    next_best: ScoredChoice | None
    num_choices: int  # that were scored; those that could not win are not


class Policy(Protocol):
    """Decides. The router's is FilteredPolicy; others can be compared with it."""

    def pick(self, request: RouteRequest, pools: Pools) -> Decision | None:
        """Return None while no choice exists; never raises, changes nothing of what it is given."""
        ...


class Filter(Protocol):
    """Keeps the workers that may be taken; never raises, never adds."""

    def __call__(self, request: RouteRequest, workers: Sequence[WorkerView]) -> list[WorkerView]:
        """Return the kept ones in order."""
        ...


class Scorer(Protocol):
    """Costs choices in seconds, lower is better; changes nothing."""

    def __call__(self, request: RouteRequest, candidates: "Candidates") -> list[ScoredChoice]:
        """Return every choice that may be the cheapest, with every term."""
        ...


class Picker(Protocol):
    """Takes one of at least one scored choices."""

    def __call__(self, scored: Sequence[ScoredChoice]) -> Decision:
        """Return it with the runner-up."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Workers that passed the filters, and how they may be combined."""

    prefill: Sequence[WorkerView]
    decode: Sequence[WorkerView]
    takers: Mapping[WorkerKey, Sequence[WorkerKey]]
    has_local: bool  # whether a decode worker alone is a choice


def keep_routable(request: RouteRequest, workers: Sequence[WorkerView]) -> list[WorkerView]:
    """Drop workers that something speaks against, and those that are full or just refused."""
    del request
    return [worker for worker in workers if worker.is_routable and not worker.is_full]


def keep_fitting(request: RouteRequest, workers: Sequence[WorkerView]) -> list[WorkerView]:
    """Drop workers whose whole pool is too small."""
    num_tokens, num_choices = request.num_tokens, request.num_choices
    return [worker for worker in workers if worker.could_hold(num_tokens, num_choices)]


def has_choice(pools: Pools, *, local_prefill: str) -> bool:
    """Whether a choice exists, however busy its workers are."""
    decode = [worker for worker in pools.decode if worker.is_routable]
    if local_prefill != "never" and decode:
        return True
    prefill = {worker.key for worker in pools.prefill if worker.is_routable}
    return any(not prefill.isdisjoint(worker.links) for worker in decode)


class CheapestPicker:
    """Takes the cheapest choice; among those about as cheap the least busy, the one without a
    transfer, then by chance.

    A burst makes all costs grow alike until their differences drown in the tie; and routers that
    see the same must not all decide the same.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, scored: Sequence[ScoredChoice]) -> Decision:
        """Pick; `scored` must not be empty."""
        ranked = sorted(scored, key=lambda entry: entry.cost.total_s)
        limit_s = ranked[0].cost.total_s * (1 + TIE_SHARE) + TIE_S
        chosen = min(
            (entry for entry in ranked if entry.cost.total_s <= limit_s),
            key=lambda entry: (
                entry.choice.num_requests,
                len(entry.choice.workers),
                self._rng.random(),
            ),
        )
        others = [entry for entry in ranked if entry is not chosen]
        return Decision(
            chosen=chosen, next_best=others[0] if others else None, num_choices=len(ranked)
        )


FILTERS: tuple[Filter, ...] = (keep_routable, keep_fitting)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilteredPolicy:
    """The three put together."""

    local_prefill: str
    scorer: Scorer
    picker: Picker
    filters: tuple[Filter, ...] = FILTERS

    def pick(self, request: RouteRequest, pools: Pools) -> Decision | None:
        """Decide, or return None while no choice exists."""
        prefill: Sequence[WorkerView] = pools.prefill
        decode: Sequence[WorkerView] = pools.decode
        for keep in self.filters:
            prefill, decode = keep(request, prefill), keep(request, decode)
        candidates = Candidates(
            prefill=prefill,
            decode=decode,
            takers=pools.takers,
            has_local=self.local_prefill == "auto",
        )
        scored = self._score(request, _without(candidates, request.excluded))
        if not scored and request.excluded:
            scored = self._score(request, candidates)
        return self.picker(scored) if scored else None

    def _score(self, request: RouteRequest, candidates: Candidates) -> list[ScoredChoice]:
        scored = self.scorer(request, candidates)
        if scored or self.local_prefill != "fallback":
            return scored
        return self.scorer(request, replace(candidates, has_local=True))


def _without(candidates: Candidates, excluded: Collection[WorkerKey]) -> Candidates:
    if not excluded:
        return candidates
    return replace(
        candidates,
        prefill=[worker for worker in candidates.prefill if worker.key not in excluded],
        decode=[worker for worker in candidates.decode if worker.key not in excluded],
    )
