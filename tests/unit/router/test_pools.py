from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from router.joint_scorer import JointCostScorer
from router.policy import CheapestPicker, FilteredPolicy, RouteRequest
from router.pools import Pools
from router.worker_view import LinkView, WorkerKey, WorkerView
from tests.unit.router.views import LINK, decode, prefill


def linked(number: int, *peers: int, **facts: Any) -> WorkerView:
    links = {WorkerKey(f"prefill-{n}", 1): LINK for n in peers}
    return decode(number, links=links, **facts)


def test_who_comes_and_goes_leaves_the_others_where_they_are() -> None:
    pools = Pools([prefill(0), prefill(1), prefill(2), linked(0, 0, 1, 2), linked(1, 2)])
    pools.remove(prefill(0).key)
    pools.settle()
    pools.check_integrity()
    assert {view.key.worker_id for view in pools.prefill} == {"prefill-1", "prefill-2"}
    pools.set(prefill(0, num_running=3))
    pools.settle()
    pools.check_integrity()


def test_a_link_that_breaks_is_gone_at_once() -> None:
    pools = Pools([prefill(0), prefill(1), linked(0, 0, 1)])
    assert len(pools.links.feeders_of(0)) == 2
    pools.set(linked(0, 1))
    pools.settle()
    pools.check_integrity()
    assert len(pools.links.feeders_of(0)) == 1


def test_news_of_a_link_are_seen_without_a_change_of_members() -> None:
    pools = Pools([prefill(0), linked(0, 0)])
    slow = LinkView(bandwidth_bytes_per_s=1.0, latency_s=7.0, queued_bytes=3)
    pools.set(decode(0, links={prefill(0).key: slow}))
    pools.settle()
    assert pools.links.latency_s.tolist() == [[7.0]]
    assert pools.links.queued_bytes.tolist() == [[3.0]]


def test_only_members_change_the_number_of_memberships() -> None:
    pools = Pools([prefill(0), linked(0, 0)])
    before = pools.num_memberships
    pools.set(prefill(0, num_running=2))
    pools.remove(WorkerKey("prefill-9", 1))
    assert pools.num_memberships == before
    pools.remove(prefill(0).key)
    assert pools.num_memberships == before + 1


STANDINGS = st.fixed_dictionaries(
    {"is_routable": st.booleans(), "num_running": st.integers(0, 9), "max_model_len": st.just(99)}
)
NEWS = st.one_of(
    st.builds(lambda number, facts: prefill(number, **facts), st.integers(0, 2), STANDINGS),
    st.builds(
        lambda number, peers, facts: linked(number, *peers, **facts),
        st.integers(0, 2),
        st.sets(st.integers(0, 2)),
        STANDINGS,
    ),
    st.builds(WorkerKey, st.sampled_from(["prefill-0", "prefill-1", "decode-0"]), st.just(1)),
)


@settings(max_examples=60)
@given(
    st.lists(NEWS, max_size=30), st.sampled_from(["never", "auto"]), st.sampled_from([50, 98, 99])
)
def test_no_choice_comes_to_be_without_an_opening(
    history: list[WorkerView | WorkerKey], local_prefill: str, num_tokens: int
) -> None:
    policy = FilteredPolicy(
        local_prefill=local_prefill, scorer=JointCostScorer(), picker=CheapestPicker(Random(1))
    )
    request = RouteRequest(num_tokens=num_tokens, num_output_tokens=9)
    pools, had_choice, num_openings = Pools(), False, 0
    for news in history:
        if isinstance(news, WorkerKey):
            pools.remove(news)
        else:
            pools.set(news)
        pools.settle()
        has_choice = policy.pick(request, pools) is not None
        assert had_choice or not has_choice or pools.num_openings > num_openings
        had_choice, num_openings = has_choice, pools.num_openings


def test_a_worker_that_is_as_full_as_before_opens_nothing() -> None:
    pools = Pools([prefill(0), prefill(1), linked(0, 0, 1, num_running=8)])
    before = pools.num_openings
    queued = LINK._replace(queued_bytes=7)
    links = {prefill(number).key: queued for number in (0, 1)}
    pools.set(decode(0, links=links, num_running=9))
    pools.set(linked(0, 1, num_running=8))
    pools.set(prefill(1, num_running=3))
    assert pools.num_openings == before
    pools.set(linked(0, 0, 1, num_running=8))
    assert pools.num_openings == before + 1
    pools.set(linked(0, 0, 1, num_running=7))
    assert pools.num_openings == before + 2


EVENTS = st.one_of(
    st.tuples(st.just("prefill"), st.integers(0, 5), st.integers(0, 9)),
    st.tuples(st.just("decode"), st.integers(0, 20), st.sets(st.integers(0, 6), max_size=6)),
    st.tuples(st.just("remove-prefill"), st.integers(0, 5), st.none()),
    st.tuples(st.just("remove-decode"), st.integers(0, 20), st.none()),
)


@settings(max_examples=60)
@given(st.lists(EVENTS, max_size=50))
def test_tables_say_what_the_views_say_after_any_history(history: list[Any]) -> None:
    pools = Pools()
    for what, number, fact in history:
        if what == "prefill":
            pools.set(prefill(number, num_running=fact))
        elif what == "decode":
            pools.set(linked(number, *fact, num_waiting=len(fact)))
        else:
            pools.remove(WorkerKey(f"{what.removeprefix('remove-')}-{number}", 1))
        pools.settle()
        pools.check_integrity()
