"""What every choice costs in all is what the plain formula says, choice by choice."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.cached_tokens import CachedTokens
from router.joint_scorer import JointCostScorer
from router.policy import CheapestPicker, Decision, FilteredPolicy, RouteRequest, ScoredChoices
from router.pools import Pools
from router.worker_view import LinkView, Pending, WorkerKey, WorkerView
from tests.unit.router.views import decode, prefill

COUNTS = st.integers(0, 8)
TOKENS = st.sampled_from([0, 1, 31, 500, 5000])
SECONDS = st.sampled_from([0.0, 1e-6, 0.003, 0.2])
LINKS = st.builds(
    LinkView,
    bandwidth_bytes_per_s=st.sampled_from([0.0, 1e4, 1e7, 1e11]),
    latency_s=SECONDS,
    queued_bytes=st.sampled_from([0, 10_000, 10**9]),
)
LOADS = st.fixed_dictionaries(
    {
        "is_routable": st.sampled_from([True, True, True, False]),
        "block_size": st.sampled_from([1, 7, 16, 32]),
        "max_num_batched_tokens": st.sampled_from([1, 128, 2048]),
        "num_running": COUNTS,
        "num_waiting": COUNTS,
        "num_promised_tokens": TOKENS,
        "num_waiting_uncached_tokens": TOKENS,
        "num_free_blocks": st.integers(0, 256),
        "num_used_blocks": st.integers(0, 256),
        "prefill_tokens_per_s": st.sampled_from([0.0, 10.0, 1e5]),
        "step_s": SECONDS,
        "request_s": SECONDS,
        "kv_token_s": st.sampled_from([0.0, 1e-8, 1e-5]),
        "pending": st.builds(
            Pending, num_requests=COUNTS, num_tokens=TOKENS, num_bytes=TOKENS, num_kv_tokens=TOKENS
        ),
    }
)
FEEDERS = st.lists(LOADS, max_size=6)
TAKERS = st.lists(st.tuples(LOADS, st.dictionaries(st.integers(0, 7), LINKS)), max_size=6)
CACHED = st.lists(st.sampled_from([0, 0, 16, 480, 900]), min_size=9, max_size=9)


def members(
    feeders: list[dict[str, Any]], takers: list[tuple[dict[str, Any], dict[int, LinkView]]]
) -> list[WorkerView]:
    views = [prefill(n, **facts) for n, facts in enumerate(feeders)]
    for n, (facts, links) in enumerate(takers):
        named = {WorkerKey(f"prefill-{peer}", 1): link for peer, link in links.items()}
        views.append(decode(n, links=named, **facts))
    return views


def held(counts: list[int], shorter: list[int]) -> CachedTokens:
    return CachedTokens(np.array(counts, float), np.minimum(counts, shorter).astype(float))


class Spy:
    """A scorer that keeps what it said."""

    def __init__(self) -> None:
        self.said: ScoredChoices | None = None

    def __call__(self, *asked: Any) -> ScoredChoices:
        self.said = JointCostScorer()(*asked)
        return self.said


def decide(
    request: RouteRequest, views: list[WorkerView], mode: str
) -> tuple[Decision | None, Spy]:
    spy = Spy()
    policy = FilteredPolicy(local_prefill=mode, scorer=spy, picker=CheapestPicker(random.Random(1)))
    return policy.pick(request, Pools(views)), spy


REQUESTS = st.builds(
    RouteRequest,
    num_tokens=st.sampled_from([1, 16, 1000]),
    num_output_tokens=st.sampled_from([0, 1, 100]),
    num_choices=st.sampled_from([1, 1, 3]),
    cached_prefill=st.builds(held, CACHED, CACHED),
    cached_decode=st.builds(held, CACHED, CACHED),
    session_workers=st.sampled_from(
        [frozenset(), frozenset({prefill(1).key, decode(0).key}), frozenset({decode(2).key})]
    ),
)


@settings(max_examples=80, deadline=None)
@given(REQUESTS, FEEDERS, TAKERS, st.sampled_from(["auto", "never"]))
def test_totals_are_what_the_plain_formula_says(
    request: RouteRequest, feeders: list[Any], takers: list[Any], mode: str
) -> None:
    views = members(feeders, takers)
    decision, spy = decide(request, views, mode)
    scored = spy.said
    assert scored is not None
    open_pairs = {("", view.key.worker_id) for view in views if may_take(view, request)}
    if mode == "never":
        open_pairs = set()
    open_pairs |= {
        (feeder.key.worker_id, taker.key.worker_id)
        for taker in views
        for feeder in views
        if feeder.key in taker.links and may_take(taker, request) and may_take(feeder, request)
    }
    open_pairs = {pair for pair in open_pairs if pair[1].startswith("decode")}
    for number, total_s in enumerate(scored.totals_s.tolist()):
        if total_s == np.inf:
            continue
        choice, cost = scored.entry(number)
        open_pairs.remove((choice.prefill.key.worker_id if choice.prefill else "",
                           choice.decode.key.worker_id))  # fmt: skip
        assert total_s == pytest.approx(cost.total_s, rel=1e-9, abs=1e-12)
    assert not open_pairs, "a choice that exists was not scored"
    check(decision, scored)


def may_take(view: WorkerView, request: RouteRequest) -> bool:
    return view.is_open and view.could_hold(request.num_tokens, request.num_choices)


def check(decision: Decision | None, scored: ScoredChoices) -> None:
    totals_s = sorted(total for total in scored.totals_s.tolist() if total != np.inf)
    if decision is None:
        assert not totals_s
        return
    assert decision.num_choices == len(totals_s)
    assert decision.chosen.cost.total_s <= totals_s[0] * 1.05 + 0.0001 + 1e-9
    assert (decision.next_best is None) == (len(totals_s) == 1)
