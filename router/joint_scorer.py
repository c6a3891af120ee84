"""Scores the choices that may be the cheapest, without scoring every pair there is.

Each prefill worker has a bound that no pair with it can beat: its queue and the computation. From
the best bound on, its linked decode workers are costed in full, until no worker left can be better
by more than ties. So a decision over a thousand workers costs a few dozen choices.
"""

import heapq
import math
import random
from collections.abc import Sequence

from router.cost import (
    HARM_WEIGHT,
    DecodePart,
    decode_part,
    local_bounds,
    local_cost,
    pair_bounds,
    pair_cost,
)
from router.policy import TIE_SHARE, Candidates, Choice, RouteRequest, ScoredChoice
from router.worker_view import WorkerKey, WorkerView

BEST_PREFILL = 32
BEST_LOCAL = 4


class JointCostScorer:
    """Applies the joint cost. Which of equal workers come first is a matter of chance."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, request: RouteRequest, candidates: Candidates) -> list[ScoredChoice]:
        """Return the best choices; none is left out that is cheaper by more than two ties."""
        search = _Search(request)
        if candidates.has_local:
            bounds = local_bounds(request.need, candidates.decode, request.cached_decode.num_tokens)
            for _, worker in self._rank(candidates.decode, bounds, BEST_LOCAL):
                search.add_local(worker)
        if candidates.decode and candidates.prefill:
            self._add_pairs(search, candidates)
        return search.scored

    def _add_pairs(self, search: "_Search", candidates: Candidates) -> None:
        request = search.request
        takers = {worker.key: worker for worker in candidates.decode}
        harm_weight = HARM_WEIGHT * request.num_output_tokens
        least_harm_s = harm_weight * min(worker.streams_s for worker in candidates.decode)
        bounds = pair_bounds(request.need, candidates.prefill, request.cached_prefill.num_tokens)
        for bound_s, worker in self._rank(candidates.prefill, bounds, BEST_PREFILL):
            # One pair is always costed, to be compared with.
            if search.has_pair and (bound_s + least_harm_s) * (1 + TIE_SHARE) >= search.best_s:
                return
            for key in candidates.takers.get(worker.key, ()):
                taker = takers.get(key)
                if taker is None:
                    continue
                if not search.has_pair or bound_s + harm_weight * taker.streams_s < search.best_s:
                    search.add_pair(worker, taker)

    def _rank(
        self, workers: Sequence[WorkerView], bounds: Sequence[float], num_best: int
    ) -> list[tuple[float, WorkerView]]:
        """The best of them with their bounds; equals in any order."""
        luck = self._rng.random
        ranked = heapq.nsmallest(
            num_best,
            [(bound_s * (1 + TIE_SHARE * luck()), number) for number, bound_s in enumerate(bounds)],
        )
        return [(bounds[number], workers[number]) for _, number in ranked]


class _Search:
    """The choices of one request that were costed."""

    def __init__(self, request: RouteRequest) -> None:
        self.request = request
        self.scored: list[ScoredChoice] = []
        self.best_s = math.inf
        self.has_pair = False
        self._need = request.need
        self._parts: dict[WorkerKey, DecodePart] = {}

    def add_local(self, decode: WorkerView) -> None:
        num_cached = self.request.cached_decode.num_tokens.get(decode.key, 0)
        cost = local_cost(
            self._need,
            decode,
            self._part(decode, num_cached),
            num_cached_decode=num_cached,
            num_strangers=self._num_strangers(decode),
        )
        self._add(ScoredChoice(Choice(None, decode), cost))

    def add_pair(self, prefill: WorkerView, decode: WorkerView) -> None:
        request = self.request
        num_cached = request.cached_decode.num_tokens.get(decode.key, 0)
        cost = pair_cost(
            self._need,
            prefill,
            decode,
            self._part(decode, num_cached),
            num_cached_prefill=request.cached_prefill.num_tokens.get(prefill.key, 0),
            num_cached_decode=num_cached,
            num_strangers=self._num_strangers(prefill, decode),
        )
        self._add(ScoredChoice(Choice(prefill, decode), cost))
        self.has_pair = True

    def _add(self, entry: ScoredChoice) -> None:
        self.scored.append(entry)
        self.best_s = min(self.best_s, entry.cost.total_s)

    def _part(self, decode: WorkerView, num_cached: int) -> DecodePart:
        part = self._parts.get(decode.key)
        if part is None:
            part = decode_part(self._need, decode, num_cached=num_cached)
            self._parts[decode.key] = part
        return part

    def _num_strangers(self, *workers: WorkerView) -> int:
        own = self.request.session_workers
        return sum(worker.key not in own for worker in workers) if own else 0
