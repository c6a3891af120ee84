"""What Serve is told of where workers run, and whom each node should then get."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.placement_plan import Node, PlacementPlan, PoolNeed, plan_placement
from kv_transfer.place import ZONE_LABEL


def node(name: str, *, zone: str = "", cpus: float = 8.0, **labels: str) -> Node:
    labels = labels | ({ZONE_LABEL: zone} if zone else {})
    return Node(node_id=name, num_cpus=cpus, labels=labels)


def need(prefill: int, decode: int, *, cpus: float = 1.0) -> list[PoolNeed]:
    return [
        PoolNeed(name="prefill", num_workers=prefill, num_cpus=cpus),
        PoolNeed(name="decode", num_workers=decode, num_cpus=cpus),
    ]


def by_node(plan: PlacementPlan) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for worker, node_id in sorted(plan.expected.items()):
        found.setdefault(node_id, []).append(worker)
    return found


nodes_of_many_kinds = st.lists(
    st.tuples(st.sampled_from(["", "a", "b"]), st.floats(0.0, 8.0)), max_size=6
).map(lambda kinds: [node(f"n{n}", zone=zone, cpus=c) for n, (zone, c) in enumerate(kinds)])
needs = st.builds(need, st.integers(0, 6), st.integers(1, 6), cpus=st.floats(0.1, 4.0))
reaches = st.sampled_from(["any", "zone", "node"])


@settings(max_examples=60, deadline=None)
@given(nodes_of_many_kinds, needs, reaches)
def test_no_node_gets_more_than_it_has_or_may(
    nodes: list[Node], pools: list[PoolNeed], reach: str
) -> None:
    plan = plan_placement(nodes, pools, reach=reach)
    by_name = {each.node_id: each for each in nodes}
    cpus: Counter[str] = Counter()
    held: Counter[tuple[str, str]] = Counter()
    for worker, node_id in plan.expected.items():
        pool = next(each for each in pools if worker.startswith(each.name))
        place = plan.pools[pool.name]
        cpus[node_id] += pool.num_cpus  # type: ignore[assignment]
        held[node_id, pool.name] += 1
        assert place.node_labels.items() <= by_name[node_id].labels.items()
        assert place.max_per_node is None or held[node_id, pool.name] <= place.max_per_node
    assert all(used <= by_name[node_id].num_cpus + 1e-6 for node_id, used in cpus.items())


@settings(max_examples=60, deadline=None)
@given(nodes_of_many_kinds, needs, reaches)
def test_who_finds_no_node_would_fit_on_none(
    nodes: list[Node], pools: list[PoolNeed], reach: str
) -> None:
    plan = plan_placement(nodes, pools, reach=reach)
    left = {each.node_id: each.num_cpus for each in nodes}
    held: Counter[tuple[str, str]] = Counter()
    for worker, node_id in plan.expected.items():
        pool = next(each for each in pools if worker.startswith(each.name))
        left[node_id] -= pool.num_cpus
        held[node_id, pool.name] += 1
    for pool in pools:
        place = plan.pools[pool.name]
        placed = sum(worker.startswith(pool.name) for worker in plan.expected)
        if placed < pool.num_workers:
            for each in nodes:
                is_eligible = place.node_labels.items() <= each.labels.items()
                has_place = place.max_per_node is None or (
                    held[each.node_id, pool.name] < place.max_per_node
                )
                has_room = left[each.node_id] > pool.num_cpus + 1e-6
                assert not (is_eligible and has_place and has_room)


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 6), st.integers(1, 8), st.integers(1, 8))
def test_the_loss_of_any_node_can_be_made_good(num_nodes: int, prefill: int, decode: int) -> None:
    nodes = [node(f"n{number}", cpus=16.0) for number in range(num_nodes)]
    plan = plan_placement(nodes, need(prefill, decode), reach="any")
    for pool, number in (("prefill", prefill), ("decode", decode)):
        limit = plan.pools[pool].max_per_node
        assert limit is None or limit * (num_nodes - 1) >= number
        counts = Counter(n for worker, n in plan.expected.items() if worker.startswith(pool))
        assert sum(counts.values()) == number
        assert max(counts.values()) - (min(counts.values()) if len(counts) == num_nodes else 0) <= 1


@pytest.mark.parametrize("num_nodes", [2, 3, 4])
def test_equal_pools_make_a_set_on_every_node(num_nodes: int) -> None:
    nodes = [node(f"n{number}") for number in range(num_nodes)]
    plan = plan_placement(nodes, need(num_nodes, num_nodes), reach="any")
    for workers in by_node(plan).values():
        assert [worker.partition("-")[0] for worker in workers] == ["decode", "prefill"]


def test_a_lone_prefill_worker_goes_beside_a_decode_worker() -> None:
    nodes = [node("n0", cpus=1.0), node("n1"), node("n2")]
    plan = plan_placement(nodes, need(1, 1, cpus=2.0), reach="any")
    assert plan.expected["prefill-0"] == plan.expected["decode-0"]


def test_where_links_stay_in_a_zone_both_pools_go_to_the_one_that_holds_them() -> None:
    nodes = [node("n0", zone="a", cpus=2.0), node("n1", zone="b"), node("n2", zone="b")]
    plan = plan_placement(nodes, need(2, 2), reach="zone")
    assert {place.node_labels[ZONE_LABEL] for place in plan.pools.values()} == {"b"}
    assert set(plan.expected.values()) == {"n1", "n2"}
    assert "both pools in zone b" in plan.reasons[0]
    anywhere = plan_placement(nodes, need(2, 2), reach="any")
    assert all(not place.node_labels for place in anywhere.pools.values())


def test_no_zone_large_enough_is_said_and_who_may_be_alone() -> None:
    nodes = [node("n0", zone="a", cpus=2.0), node("n1", zone="b", cpus=1.0)]
    plan = plan_placement(nodes, need(1, 2), reach="zone")
    assert "no zone of a, b holds both pools" in plan.reasons[0]
    assert len(plan.expected) == 3
    [alone] = [line for line in plan.reasons if "may find no partner" in line]
    assert alone.startswith("decode-")


def test_labels_that_were_asked_for_stay() -> None:
    nodes = [node("n0", zone="a", role="p"), node("n1", zone="a", role="d"), node("n2", zone="b")]
    pools = need(1, 1)
    pools = [replace(pools[0], node_labels={"role": "p"}), replace(pools[1])]
    plan = plan_placement(nodes, pools, reach="zone")
    assert plan.pools["prefill"].node_labels == {"role": "p", ZONE_LABEL: "a"}
    assert plan.expected["prefill-0"] == "n0"


def test_one_node_or_none_leaves_serve_alone() -> None:
    for nodes in ([], [node("n0")]):
        plan = plan_placement(nodes, need(2, 2), reach="node")
        assert all(place.max_per_node is None for place in plan.pools.values())
        assert all(not place.node_labels for place in plan.pools.values())
        assert plan.reasons == []
