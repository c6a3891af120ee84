"""Filter, Scorer, Picker: which workers serve a request. Plain data in, a decision out."""

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple, Protocol

import numpy as np

from router.cached_tokens import CachedTokens
from router.cost import Cost, Need
from router.pools import NOBODY, Columns, Floats, Mask, Pools, Rows
from router.worker_view import DECODE, PREFILL, WorkerKey, WorkerView

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

    def need(self, num_kept_waiting: float = 0.0) -> Need:
        """What it asks of any worker, while so many prompts wait on each."""
        return Need(
            num_tokens=self.num_tokens,
            num_output_tokens=self.num_output_tokens,
            num_choices=self.num_choices,
            num_kept_waiting=num_kept_waiting,
        )


class Choice(NamedTuple):
    """A decode worker, and the prefill worker that feeds it; None: it prefills itself."""

    prefill: WorkerView | None
    decode: WorkerView

    @property
    def workers(self) -> tuple[WorkerView, ...]:
        """All of them."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredChoices:
    """Every choice and what it costs in all, by its number (`LinkTable`).

    What may not be taken costs infinitely much.
    """

    pools: Pools
    totals_s: Floats
    explain: Callable[[Choice], Cost]

    def choice(self, number: int) -> Choice:
        """One of them."""
        pools = self.pools
        feeder = pools.links.feeder_of(number)
        prefill = pools.prefill[feeder] if feeder != NOBODY else None
        return Choice(prefill, pools.decode[pools.links.taker_of(number)])

    def entry(self, number: int) -> ScoredChoice:
        """One of them with the terms of its cost."""
        choice = self.choice(number)
        return ScoredChoice(choice, self.explain(choice))

    def loads(self, numbers: Rows) -> Floats:
        """Requests that the workers of each have, doubled, and one more for a pair."""
        tables, links = self.pools.tables, self.pools.links
        feeders = links.feeder_of(numbers)
        counts: Floats = tables[PREFILL].with_nobody("num_requests")[feeders]
        counts += tables[DECODE].columns.num_requests[links.taker_of(numbers)]
        counts *= 2.0
        counts += feeders != NOBODY
        return counts


class Filter(Protocol):
    """Says of each worker of a pool whether it may be taken; never raises."""

    def __call__(self, request: RouteRequest, workers: Columns) -> Mask:
        """Return True for those that are kept."""
        ...


class Scorer(Protocol):
    """Costs choices in seconds, lower is better; changes nothing."""

    def __call__(self, request: RouteRequest, candidates: "Candidates") -> ScoredChoices:
        """Return every choice that may be the cheapest."""
        ...


class Picker(Protocol):
    """Takes one of the scored choices."""

    def __call__(self, scored: ScoredChoices) -> Decision | None:
        """Return it with the runner-up; None when none may be taken."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Which workers passed the filters, and how they may be combined."""

    pools: Pools
    masks: Mapping[str, Mask]  # by pool, an entry for each row
    has_local: bool  # whether a decode worker alone is a choice


def keep_able(request: RouteRequest, workers: Columns) -> Mask:
    """Keep workers that may be given a request now, and whose whole pool is large enough for it.

    `WorkerView.is_open` and `could_hold`, of one choice.
    """
    mask: Mask = workers.open_tokens >= request.num_tokens
    return mask


def keep_branching(request: RouteRequest, workers: Columns) -> Mask:
    """The same of decode workers, where all choices must have room beside each other."""
    mask, num_choices = keep_able(request, workers), request.num_choices
    if num_choices > 1:
        num_blocks = request.num_tokens // workers.block_size + num_choices
        mask &= (num_blocks <= workers.num_kv_blocks) & (num_choices <= workers.max_num_seqs)
    return mask


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

    def __call__(self, scored: ScoredChoices) -> Decision | None:
        """Pick; None when nothing may be taken."""
        totals_s = scored.totals_s
        if not len(totals_s):
            return None
        chosen = int(totals_s.argmin())
        best_s = totals_s.item(chosen)
        if best_s == inf:
            return None
        near = (totals_s <= best_s * (1 + TIE_SHARE) + TIE_S).nonzero()[0]
        if len(near) > 1:
            chosen = self._pick_near(scored, near)
        num_choices = int(np.count_nonzero(totals_s != inf))
        others_s = totals_s.copy()
        others_s[chosen] = inf
        return Decision(
            chosen=scored.entry(chosen),
            next_best=scored.entry(int(others_s.argmin())) if num_choices > 1 else None,
            num_choices=num_choices,
        )

    def _pick_near(self, scored: ScoredChoices, near: Rows) -> int:
        loads = scored.loads(near)
        equals = near[loads == loads[loads.argmin()]]
        return int(equals[int(self._rng.random() * len(equals))])


FILTERS: Mapping[str, tuple[Filter, ...]] = {
    PREFILL: (keep_able,),
    DECODE: (keep_branching,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FilteredPolicy:
    """The three put together."""

    local_prefill: str
    scorer: Scorer
    picker: Picker
    filters: Mapping[str, tuple[Filter, ...]] = field(default_factory=lambda: FILTERS)

    def pick(self, request: RouteRequest, pools: Pools) -> Decision | None:
        """Decide, or return None while no choice exists."""
        candidates = Candidates(
            pools=pools,
            masks={pool: self._mask(request, pools, pool) for pool in (PREFILL, DECODE)},
            has_local=self.local_prefill == "auto",
        )
        decision = self._decide(request, _without(candidates, request.excluded))
        if decision is None and request.excluded:
            decision = self._decide(request, candidates)
        return decision

    def _mask(self, request: RouteRequest, pools: Pools, pool: str) -> Mask:
        columns = pools.tables[pool].columns
        first, *others = self.filters[pool]
        mask: Mask = first(request, columns)
        for keep in others:
            mask &= keep(request, columns)
        return mask

    def _decide(self, request: RouteRequest, candidates: Candidates) -> Decision | None:
        decision = self._take_cheapest(request, candidates)
        if decision is None and self.local_prefill == "fallback":
            decision = self._take_cheapest(request, replace(candidates, has_local=True))
        return decision

    def _take_cheapest(self, request: RouteRequest, candidates: Candidates) -> Decision | None:
        return self.picker(self.scorer(request, candidates))


def _without(candidates: Candidates, excluded: Collection[WorkerKey]) -> Candidates:
    if not excluded:
        return candidates
    tables = candidates.pools.tables
    masks = {pool: mask & ~tables[pool].mask(excluded) for pool, mask in candidates.masks.items()}
    return replace(candidates, masks=masks)
