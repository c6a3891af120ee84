"""Scores the choices that may be the cheapest, without scoring every pair there is.

Each prefill worker has a bound that no pair with it can beat: its queue and the computation. From
the best bound on, its linked decode workers are costed in full, until no worker left can be better
by more than a tie. So a decision over a thousand workers costs a few dozen pairs.
"""

import heapq
import math
import random
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import TypeAlias

from router.cost import DecodePart, decode_part, local_bound_s, local_cost, pair_cost, prefill_s
from router.policy import TIE_SHARE, Candidates, Choice, RouteRequest, ScoredChoice
from router.worker_view import WorkerKey, WorkerView

BEST_PREFILL = 32
BEST_LOCAL = 8

_Taker: TypeAlias = tuple[WorkerView, DecodePart]


class JointCostScorer:
    """Applies the joint cost. Which of equal workers come first is a matter of chance."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, request: RouteRequest, candidates: Candidates) -> list[ScoredChoice]:
        """Return the best choices; none is left out that is cheaper by more than a tie."""
        need, cached = request.need, request.cached_decode.num_tokens
        takers = {
            worker.key: (
                worker,
                decode_part(need, worker, num_cached=cached.get(worker.key, 0)),
            )
            for worker in candidates.decode
        }
        scored = self._score_local(request, takers.values()) if candidates.has_local else []
        if takers:
            self._add_pairs(request, candidates, takers, scored)
        return scored

    def _score_local(self, request: RouteRequest, takers: Iterable[_Taker]) -> list[ScoredChoice]:
        need, cached = request.need, request.cached_decode.num_tokens
        ranked = [
            (
                local_bound_s(need, worker, part, num_cached_decode=cached.get(worker.key, 0))
                * self._luck(),
                worker,
                part,
            )
            for worker, part in takers
        ]
        return [
            ScoredChoice(
                Choice(prefill=None, decode=worker),
                local_cost(
                    need,
                    worker,
                    part,
                    num_cached_decode=cached.get(worker.key, 0),
                    num_strangers=_num_strangers(request, worker),
                ),
            )
            for _, worker, part in heapq.nsmallest(BEST_LOCAL, ranked, key=itemgetter(0))
        ]

    def _add_pairs(
        self,
        request: RouteRequest,
        candidates: Candidates,
        takers: Mapping[WorkerKey, _Taker],
        scored: list[ScoredChoice],
    ) -> None:
        best_s = min((entry.cost.total_s for entry in scored), default=math.inf)
        least_harm_s = min(part.harm_s for _, part in takers.values())
        has_pair = False
        for bound_s, worker in self._rank_prefill(request, candidates.prefill):
            # One pair is always costed, to be compared with.
            if has_pair and (bound_s + least_harm_s) * (1 + TIE_SHARE) >= best_s:
                return
            for key in candidates.takers.get(worker.key, ()):
                taker = takers.get(key)
                if taker is None or (has_pair and bound_s + taker[1].harm_s >= best_s):
                    continue
                entry = _score_pair(request, worker, taker)
                scored.append(entry)
                best_s, has_pair = min(best_s, entry.cost.total_s), True

    def _rank_prefill(
        self, request: RouteRequest, workers: Iterable[WorkerView]
    ) -> list[tuple[float, WorkerView]]:
        num_tokens, cached = request.num_tokens, request.cached_prefill.num_tokens
        ranked = [
            (
                (worker.queue_s + prefill_s(num_tokens - cached.get(worker.key, 0), worker)),
                worker,
            )
            for worker in workers
        ]
        return heapq.nsmallest(BEST_PREFILL, ranked, key=lambda entry: entry[0] * self._luck())

    def _luck(self) -> float:
        return 1 + TIE_SHARE * self._rng.random()


def _score_pair(request: RouteRequest, prefill: WorkerView, taker: _Taker) -> ScoredChoice:
    decode, part = taker
    cost = pair_cost(
        request.need,
        prefill,
        decode,
        part,
        num_cached_prefill=request.cached_prefill.num_tokens.get(prefill.key, 0),
        num_cached_decode=request.cached_decode.num_tokens.get(decode.key, 0),
        num_strangers=_num_strangers(request, prefill, decode),
    )
    return ScoredChoice(Choice(prefill=prefill, decode=decode), cost)


def _num_strangers(request: RouteRequest, *workers: WorkerView) -> int:
    if not request.session_workers:
        return 0
    return sum(worker.key not in request.session_workers for worker in workers)
