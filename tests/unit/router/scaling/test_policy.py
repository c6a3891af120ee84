"""The plan: in bounds, without flapping, more for more load, both pools at once."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from router.scaling.load import ClusterLoad, DecodeLoad, PrefillLoad
from router.scaling.policy import ScalingPlan, begin, decide
from router.worker_view import DECODE, PREFILL
from tests.unit.router.scaling.loads import config, load

CONFIG = config()
POOLS = (PREFILL, DECODE)
ONE_EACH = {PREFILL: 1, DECODE: 1}

loads = st.builds(
    ClusterLoad,
    now_s=st.just(0.0),
    prefill=st.builds(
        PrefillLoad,
        num_workers=st.integers(0, 10),
        waiting_tokens=st.integers(0, 20_000),
        computed_tokens_per_s=st.floats(0.0, 10_000.0),
        token_s=st.just(0.001),
    ),
    decode=st.builds(
        DecodeLoad,
        num_workers=st.integers(0, 10),
        num_streams=st.integers(0, 120),
        max_streams=st.just(10.0),
        kv_tokens=st.integers(0, 12_000),
        max_kv_tokens=st.just(1000.0),
        step_s=st.floats(0.0, 0.06),
        streams_s=st.floats(0.0, 0.5),
    ),
    queued_requests=st.integers(0, 50),
    queued_tokens=st.integers(0, 10_000),
)


def follow(series: Sequence[ClusterLoad], *, obeyed: bool = False) -> list[ScalingPlan]:
    """One load a second; `obeyed`: the live workers are those of the plan before."""
    plan = begin(CONFIG, ONE_EACH, now_s=0.0)
    plans = [plan]
    for number, each in enumerate(series, start=1):
        moment = replace(each, now_s=float(number))
        if obeyed:
            moment = replace(
                moment,
                prefill=replace(moment.prefill, num_workers=plan.pools[PREFILL].target),
                decode=replace(moment.decode, num_workers=plan.pools[DECODE].target),
            )
        plan = decide(moment, plan, CONFIG)
        plans.append(plan)
    return plans


def targets(plans: Sequence[ScalingPlan], pool: str) -> list[int]:
    return [plan.pools[pool].target for plan in plans]


@settings(max_examples=50, deadline=None)
@given(st.lists(loads, max_size=60))
def test_never_below_the_least_nor_above_the_most(series: list[ClusterLoad]) -> None:
    for pool in POOLS:
        assert all(1 <= target <= 8 for target in targets(follow(series), pool))


# A swing needs some seconds of the same load: lists of single seconds would hardly ever show one.
swings = st.lists(st.tuples(loads, st.integers(1, 40)), min_size=1, max_size=4).map(
    lambda phases: [each for each, num_seconds in phases for _ in range(num_seconds)]
)


@settings(max_examples=50, deadline=None)
@given(swings, st.booleans())
def test_a_target_turns_only_after_the_delay(series: list[ClusterLoad], obeyed: bool) -> None:
    plans = follow(series, obeyed=obeyed)
    for pool in POOLS:
        grew_at, shrank_at = float("-inf"), float("-inf")
        numbers = targets(plans, pool)
        for second, (before, after) in enumerate(itertools.pairwise(numbers), start=1):
            if after > before:
                assert second - shrank_at > 5.0, (pool, second)
                grew_at = second
            elif after < before:
                assert second - grew_at > 30.0, (pool, second)
                shrank_at = second


@settings(max_examples=50, deadline=None)
@given(
    st.lists(loads, min_size=1, max_size=10),
    loads,
    st.floats(1.0, 3.0),
    st.sampled_from(["prefill", "decode", "queue"]),
)
def test_more_load_never_means_fewer_workers(
    series: list[ClusterLoad], last: ClusterLoad, factor: float, what: str
) -> None:
    plan = follow(series)[-1]
    at_s = float(len(series) + 1)
    less = replace(last, now_s=at_s)
    if what == "prefill":
        more = replace(
            less,
            prefill=replace(
                less.prefill,
                waiting_tokens=int(less.prefill.waiting_tokens * factor) + 1,
                computed_tokens_per_s=less.prefill.computed_tokens_per_s * factor,
            ),
        )
    elif what == "decode":
        more = replace(
            less,
            decode=replace(
                less.decode,
                num_streams=int(less.decode.num_streams * factor) + 1,
                kv_tokens=int(less.decode.kv_tokens * factor) + 1,
                streams_s=less.decode.streams_s * factor,
            ),
        )
    else:
        more = replace(less, queued_requests=less.queued_requests + 5, queued_tokens=9000)
        less = replace(less, queued_tokens=min(less.queued_tokens, 9000))
    for pool in POOLS:
        of_less, of_more = (decide(each, plan, CONFIG).pools[pool] for each in (less, more))
        assert of_more.target >= of_less.target
        assert of_more.advice[-1].num_workers >= of_less.advice[-1].num_workers


def steady(seconds: int, **parts: object) -> list[ClusterLoad]:
    return [load(**parts)] * seconds  # type: ignore[arg-type]


BUSY = {"computed_tokens_per_s": 1900.0}  # 1.9 workers without a pause: 3.8 at half the time
FULL = {"num_streams": 19}  # 3.8 workers


def test_a_load_that_stays_is_met_and_given_up_when_it_has_gone() -> None:
    plans = follow(steady(20, prefill=BUSY, decode=FULL) + steady(60), obeyed=True)
    for pool in POOLS:
        numbers = targets(plans, pool)
        assert numbers[4] == 1, "it has not lasted yet"
        assert numbers[20] == 4, "two, then twice two"
        assert numbers[45] == 4, "kept for a while"
        assert numbers[-1] == 1


def test_a_short_burst_starts_nobody() -> None:
    plans = follow(steady(4, prefill=BUSY, decode=FULL) + steady(20), obeyed=True)
    assert targets(plans, PREFILL)[-1] == targets(plans, DECODE)[-1] == 1
    assert max(targets(plans, PREFILL)) == 1


def test_growth_waits_for_the_workers_that_are_starting() -> None:
    # One live worker all the time: what it lacks beyond twice is not known.
    numbers = targets(follow(steady(20, prefill={"waiting_tokens": 50_000})), PREFILL)
    assert max(numbers) == 2


def test_a_pool_is_not_given_up_while_the_other_one_holds_it_back() -> None:
    # Decode is full, so prompts wait in the router and prefill workers have little to do.
    series = steady(20, prefill=BUSY, decode=FULL)
    held_back = steady(60, decode={"num_streams": 200, "num_workers": 2})
    numbers = targets(follow(series + held_back, obeyed=False), PREFILL)
    assert numbers[-1] == max(numbers) > 1
    free = targets(follow(series + steady(60), obeyed=False), PREFILL)
    assert free[-1] == 1


def test_a_growing_prefill_pool_announces_its_streams_to_decode() -> None:
    # Decode is just right for what one saturated prefill worker lets through.
    streams = {"num_streams": 5}
    alone = follow(steady(20, decode=streams), obeyed=True)
    assert targets(alone, DECODE)[-1] == 1
    saturated = follow(steady(20, prefill={"waiting_tokens": 4000}, decode=streams))
    assert targets(saturated, PREFILL)[-1] == 2
    assert targets(saturated, DECODE)[-1] == 2
    assert "prefill lets 2.0 times as many through" in saturated[-1].pools[DECODE].reason


def test_a_pool_at_its_most_does_not_keep_the_other_one() -> None:
    crowd = {"num_streams": 1000, "num_workers": 8}
    series = steady(20, prefill=BUSY, decode=FULL) + steady(80, decode=crowd)
    assert targets(follow(series), PREFILL)[-1] == 1


def test_the_reason_stays_with_the_target_it_led_to() -> None:
    plans = follow(steady(20, prefill=BUSY) + steady(5), obeyed=True)
    pool = plans[-1].pools[PREFILL]
    assert "1900 prompt tokens/s keep 1.9 worker(s) busy" in pool.reason
    assert pool.since_s < 20.0
    assert "0 prompt tokens/s" in pool.signal


def test_a_young_plan_counts_whoever_turns_up() -> None:
    late = steady(3, decode={"num_workers": 1}) + steady(40, decode={"num_workers": 3})
    numbers = targets(follow(late), DECODE)
    assert numbers[3:5] == [1, 3]
    assert numbers[28] == 3
    assert numbers[-1] == 1, "later they are too many"


def test_workers_that_turn_up_late_are_judged_by_what_came_after() -> None:
    nobody = [load(prefill={"num_workers": 0}, decode={"num_workers": 0})] * 15
    late = [load(prefill={"num_workers": 4}, decode={"num_workers": 1})] * 40
    numbers = targets(follow([*nobody, *late]), PREFILL)
    assert numbers[15:17] == [1, 4]
    assert numbers.index(1, 16) == 16 + 31  # and not when the plan is as old as the delay


def test_a_pool_without_a_live_worker_stays_as_it_is() -> None:
    series = steady(20, decode=FULL) + steady(90, decode={"num_workers": 0}, queued_requests=50)
    numbers = targets(follow(series), DECODE)
    assert numbers[20] == numbers[-1] == 2


def test_one_pool_alone_may_be_scaled() -> None:
    only_decode = replace(CONFIG, prefill=None)
    plan = begin(only_decode, ONE_EACH, now_s=0.0)
    for second in range(1, 10):
        plan = decide(load(float(second), decode=FULL), plan, only_decode)
    assert {name: pool.target for name, pool in plan.pools.items()} == {DECODE: 2}
