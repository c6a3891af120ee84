"""Scores the choices that may be the cheapest: all decode workers alone, and the best pairs.

    local   [decode workers]
    pairs   [best prefill workers, links of each], the decode workers' numbers looked up by link

Each prefill worker has a bound that no pair with it can beat: its queue and the computation. Of the
best by that bound all pairs are costed. All is done over columns of numbers, so a thousand workers
take little longer than ten.
"""

import random
from dataclasses import replace
from math import inf

import numpy as np

from router.cost import DecodePart, decode_part, local_cost, pair_bound, pair_cost
from router.policy import TIE_SHARE, Candidates, RouteRequest, ScoredChoices
from router.pools import NOBODY, Floats, Rows
from router.worker_view import DECODE, PREFILL

FEEDER_COLUMNS = ("queue_s", "fixed_s", "token_s", "chunk_tokens")
BEST_PREFILL = 32
TAKER_COLUMNS = ("kv_bytes_per_token", "pending_bytes")


class JointCostScorer:
    """Applies the joint cost. Which of equal prefill workers are looked at is up to chance."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = np.random.default_rng(rng.getrandbits(64))

    def __call__(self, request: RouteRequest, candidates: Candidates) -> list[ScoredChoices]:
        """Return the choices in up to two groups."""
        tables = candidates.pools.tables
        decode = tables[DECODE]
        if not len(decode.views):
            return []
        cached = decode.spread(request.cached_decode.num_tokens)
        part = decode_part(request.need, decode.columns, num_cached=cached)
        scored = []
        if candidates.has_local:
            scored.append(_score_local(request, candidates, part))
        if len(tables[PREFILL].views):
            scored.append(_score_pairs(request, candidates, part, cached, self._rng))
        return scored


def _score_local(request: RouteRequest, candidates: Candidates, part: DecodePart) -> ScoredChoices:
    decode = candidates.pools.tables[DECODE]
    # What a hand-over will bring some day saves no computation now.
    cached = decode.spread(request.cached_decode.num_confirmed)
    own = request.session_workers
    cost = local_cost(
        request.need,
        decode.columns,
        part,
        num_cached_decode=cached,
        num_strangers=1.0 - decode.mask(own) if own else 0.0,
    )
    total_s = np.where(candidates.masks[DECODE], cost.total_s, inf)
    return ScoredChoices(
        candidates.pools, None, np.arange(len(total_s)), cost._replace(total_s=total_s)
    )


def _score_pairs(
    request: RouteRequest,
    candidates: Candidates,
    part: DecodePart,
    cached_decode: Floats,
    rng: np.random.Generator,
) -> ScoredChoices:
    pools, masks = candidates.pools, candidates.masks
    prefill, decode = pools.tables[PREFILL], pools.tables[DECODE]
    cached_prefill = prefill.spread(request.cached_prefill.num_tokens)
    bounds_s = pair_bound(request.need, prefill.columns, cached_prefill)
    feeders = _best(np.where(masks[PREFILL], bounds_s, inf), rng)
    numbers = pools.links.links_of(len(prefill.views))[feeders]
    takers = pools.links.takers(numbers)
    upright = feeders[:, None]
    own = request.session_workers
    need = replace(request.need, num_kept_waiting=prefill.columns.num_prompts_ahead.mean())
    cost = pair_cost(
        need,
        prefill.columns.take(FEEDER_COLUMNS, upright),
        decode.columns.take(TAKER_COLUMNS, takers),
        pools.links.columns(numbers),
        DecodePart(*(term[takers] for term in part)),
        num_cached_prefill=cached_prefill[upright],
        num_cached_decode=cached_decode[takers],
        num_strangers=2.0 - prefill.mask(own)[upright] - decode.mask(own)[takers] if own else 0.0,
    )
    may_be_taken = (numbers != NOBODY) & masks[PREFILL][upright] & masks[DECODE][takers]
    total_s = np.where(may_be_taken, cost.total_s, inf)
    return ScoredChoices(pools, feeders, takers, cost._replace(total_s=total_s))


def _best(bounds_s: Floats, rng: np.random.Generator) -> Rows:
    """Rows of the prefill workers with the best bounds; equals in any order."""
    if len(bounds_s) <= BEST_PREFILL:
        return np.arange(len(bounds_s))
    noisy_s = bounds_s * (1.0 + TIE_SHARE * rng.random(len(bounds_s)))
    return np.argpartition(noisy_s, BEST_PREFILL)[:BEST_PREFILL]
