from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

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
