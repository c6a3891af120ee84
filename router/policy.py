"""Filter, Scorer, Picker: which workers serve a request. Plain data in, a decision out."""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from router.cost import Cost, Need
from router.pools import Columns, Pools, Rows
from router.prefix_index import CachedTokens
from router.worker_view import DECODE, PREFILL, WorkerKey, WorkerView

Mask = npt.NDArray[np.bool_]

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


@dataclass(frozen=True, slots=True)
class ScoredChoices:
    """Many choices and what they cost; what may not be taken costs infinitely much.

    The terms of the cost are arrays: of decode workers alone [decode workers], of pairs
    [prefill workers, links of each]; a term that is equal for all links has length 1 there.
    """

    pools: Pools
    prefill_rows: Rows | None  # [prefill workers], in their table; None: decode workers alone
    decode_rows: Rows  # of the shape of the cost
    cost: Cost

    def place(self, number: int) -> tuple[int, ...]:
        """Where a choice stands in the arrays, from its number in the flat ones."""
        return (number,) if self.prefill_rows is None else divmod(number, self.decode_rows.shape[1])

    def choice(self, number: int) -> Choice:
        """One of them."""
        place = self.place(number)
        prefill = None
        if self.prefill_rows is not None:
            prefill = self.pools.prefill[self.prefill_rows[place[0]]]
        return Choice(prefill, self.pools.decode[self.decode_rows[place]])

    def entry(self, number: int) -> ScoredChoice:
        """One of them with its cost."""
        return ScoredChoice(self.choice(number), self.cost.at(self.place(number)))


class Filter(Protocol):
    """Says of each worker of a pool whether it may be taken; never raises."""

    def __call__(self, request: RouteRequest, workers: Columns) -> Mask:
        """Return True for those that are kept."""
        ...


class Scorer(Protocol):
    """Costs choices in seconds, lower is better; changes nothing."""

    def __call__(self, request: RouteRequest, candidates: "Candidates") -> Sequence[ScoredChoices]:
        """Return every choice that may be the cheapest, with every term."""
        ...


class Picker(Protocol):
    """Takes one of the scored choices."""

    def __call__(self, scored: Sequence[ScoredChoices]) -> Decision | None:
        """Return it with the runner-up; None when none may be taken."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Which workers passed the filters, and how they may be combined."""

    pools: Pools
    masks: Mapping[str, Mask]  # by pool, an entry for each row
    has_local: bool  # whether a decode worker alone is a choice


def keep_open(request: RouteRequest, workers: Columns) -> Mask:
    """Drop workers that something speaks against, and those that are full or just refused."""
    del request
    mask: Mask = workers.is_open > 0.0
    return mask


def keep_fitting(request: RouteRequest, workers: Columns) -> Mask:
    """Drop workers whose whole pool is too small (WorkerView.could_hold)."""
    mask: Mask = workers.max_tokens >= request.num_tokens
    return mask


def keep_branching(request: RouteRequest, workers: Columns) -> Mask:
    """The same of decode workers, where all choices must have room beside each other."""
    fits, num_choices = keep_fitting(request, workers), request.num_choices
    if num_choices > 1:
        num_blocks = request.num_tokens // workers.block_size + num_choices
        fits &= (num_blocks <= workers.num_kv_blocks) & (num_choices <= workers.max_num_seqs)
    return fits


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

    def __call__(self, scored: Sequence[ScoredChoices]) -> Decision | None:
        """Pick; None when nothing may be taken."""
        totals_s = np.concatenate([group.cost.total_s.ravel() for group in scored])
        best_s = totals_s.min()
        if best_s == np.inf:
            return None
        near = np.flatnonzero(totals_s <= best_s * (1 + TIE_SHARE) + TIE_S).tolist()
        num_choices = int(np.count_nonzero(totals_s != np.inf))
        chosen = near[0] if len(near) == 1 else self._pick_near(scored, near)
        totals_s[chosen] = np.inf
        second = int(totals_s.argmin())
        return Decision(
            chosen=_entry(scored, chosen),
            next_best=_entry(scored, second) if num_choices > 1 else None,
            num_choices=num_choices,
        )

    def _pick_near(self, scored: Sequence[ScoredChoices], near: list[int]) -> int:
        def rank(number: int) -> tuple[int, int, float]:
            group, inner = _find(scored, number)
            choice = group.choice(inner)
            return choice.num_requests, len(choice.workers), self._rng.random()

        return min(near, key=rank)


def _find(scored: Sequence[ScoredChoices], number: int) -> tuple[ScoredChoices, int]:
    for group in scored:
        if number < group.cost.total_s.size:
            return group, number
        number -= group.cost.total_s.size
    raise AssertionError("no such choice")


def _entry(scored: Sequence[ScoredChoices], number: int) -> ScoredChoice:
    group, inner = _find(scored, number)
    return group.entry(inner)


FILTERS: Mapping[str, tuple[Filter, ...]] = {
    PREFILL: (keep_open, keep_fitting),
    DECODE: (keep_open, keep_branching),
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
        scored = self.scorer(request, candidates)
        return self.picker(scored) if scored else None


def _without(candidates: Candidates, excluded: Collection[WorkerKey]) -> Candidates:
    if not excluded:
        return candidates
    tables = candidates.pools.tables
    masks = {pool: mask & ~tables[pool].mask(excluded) for pool, mask in candidates.masks.items()}
    return replace(candidates, masks=masks)
