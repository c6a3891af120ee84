"""Scores every choice by the joint cost: all decode workers alone, and all linked pairs.

Totals come from columns of numbers, all at once; the terms of a choice from its two workers' views.
"""

from functools import partial
from math import inf

import numpy as np

from router.cost import Cost, Need, decode_part, local_cost, pair_cost
from router.policy import Candidates, Choice, RouteRequest, ScoredChoices
from router.totals import Side, decode_totals, put_local_totals, put_pair_totals
from router.worker_view import DECODE, PREFILL


class JointCostScorer:
    """Applies the joint cost."""

    def __call__(self, request: RouteRequest, candidates: Candidates) -> ScoredChoices:
        """Return all choices, what may not be taken among them."""
        pools = candidates.pools
        tables, links = pools.tables, pools.links
        need = request.need(tables[PREFILL].mean_prompts_ahead)
        decode = _side(request, candidates, DECODE)
        wait_s, base_s = decode_totals(need, decode)
        totals_s = np.empty(links.shape)
        if candidates.has_local:
            num_confirmed = request.cached_decode.confirmed(tables[DECODE].slots)
            put_local_totals(
                need,
                decode,
                num_confirmed=num_confirmed,
                wait_s=wait_s,
                base_s=base_s,
                out=totals_s[0],
            )
        else:
            totals_s[0] = inf
        prefill = _side(request, candidates, PREFILL)
        put_pair_totals(
            need, prefill, decode, links, wait_s=wait_s, base_s=base_s, out=totals_s[1:]
        )
        return ScoredChoices(
            pools=pools, totals_s=totals_s.ravel(), explain=partial(explain, request, need)
        )


def explain(request: RouteRequest, need: Need, choice: Choice) -> Cost:
    """Every term of one choice."""
    prefill, decode = choice
    num_cached = request.cached_decode.num_tokens_of(decode)
    part = decode_part(need, decode, num_cached=num_cached)
    own = request.session_workers
    num_strangers = sum(worker.key not in own for worker in choice.workers) if own else 0
    if prefill is None:
        num_confirmed = request.cached_decode.num_confirmed_of(decode)
        return local_cost(
            need, decode, part, num_cached_decode=num_confirmed, num_strangers=num_strangers
        )
    return pair_cost(
        need,
        prefill,
        decode,
        decode.links[prefill.key],
        part,
        num_cached_prefill=request.cached_prefill.num_tokens_of(prefill),
        num_cached_decode=num_cached,
        num_strangers=num_strangers,
    )


def _side(request: RouteRequest, candidates: Candidates, pool: str) -> Side:
    table = candidates.pools.tables[pool]
    cached = request.cached_prefill if pool == PREFILL else request.cached_decode
    own = request.session_workers
    return Side(
        columns=table.columns,
        mask=candidates.masks[pool],
        num_cached=cached.expected(table.slots),
        strangers=(~table.mask(own)).astype(np.float64) if own else None,
    )
