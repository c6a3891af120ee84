"""Whether replicas find a node."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.placement import Demand, unplaceable

NODE = {"CPU": 2.0, "GPU": 1.0, "memory": 1e9}


def test_what_fits_is_not_mentioned() -> None:
    demands = [Demand(name=f"decode-{rank}", num_cpus=0.4) for rank in range(5)]
    assert unplaceable(demands, [NODE]) == []


def test_too_many_cpus_are_named() -> None:
    lines = unplaceable([Demand(name="prefill-0", num_cpus=64.0)], [NODE])
    assert lines == ["prefill-0 needs 64 CPU, but no node has more than 2 left"]


def test_a_missing_gpu_is_named() -> None:
    demands = [Demand(name=f"decode-{rank}", num_gpus=1.0) for rank in range(2)]
    assert unplaceable(demands, [NODE]) == [
        "decode-1 needs 1 GPU, but no node has more than 0 left"
    ]


def test_no_node_at_all() -> None:
    lines = unplaceable([Demand(name="decode-0", num_cpus=0.1)], [])
    assert lines == ["decode-0 needs 0.1 CPU, but no node has more than 0 left"]


def test_ingresses_take_a_node_each() -> None:
    demands = [Demand(name=f"ingress-{rank}", num_cpus=0.2, max_per_node=1) for rank in range(3)]
    assert unplaceable(demands, [NODE, NODE]) == [
        "ingress-2 needs another node: all 2 have as many as ingress.max_per_node allows, 1"
    ]


def test_ingresses_that_share_a_node_are_no_more_than_they_may() -> None:
    demands = [Demand(name=f"ingress-{rank}", num_cpus=0.2, max_per_node=2) for rank in range(5)]
    lines = unplaceable(demands, [NODE, NODE])
    assert lines == [
        "ingress-4 needs another node: all 2 have as many as ingress.max_per_node allows, 2"
    ]


def test_a_replica_needs_a_node_with_all_its_labels() -> None:
    demand = Demand(name="prefill-0", num_gpus=1, node_labels={"role": "prefill", "zone": "a"})
    labels = [{"role": "prefill", "zone": "b"}, {"role": "decode", "zone": "a"}]
    assert unplaceable([demand], [NODE, NODE], labels=labels) == [
        "prefill-0 needs a node with the labels role=prefill, zone=a, and there is none"
    ]
    labels[0]["zone"] = "a"
    assert unplaceable([demand], [NODE, NODE], labels=labels) == []
    assert unplaceable([demand] * 2, [NODE, NODE], labels=labels) == [
        "prefill-0 needs 1 GPU, but no node has more than 0 left"
    ]


def test_cpu_and_gpu_must_be_on_the_same_node() -> None:
    nodes = [{"CPU": 8.0}, {"CPU": 0.5, "GPU": 1.0}]
    lines = unplaceable([Demand(name="decode-0", num_cpus=1.0, num_gpus=1.0)], nodes)
    assert lines == ["decode-0 needs 1 CPU and 1 GPU on one node"]


@given(st.lists(st.floats(0.1, 1.0), max_size=12))
def test_nothing_is_missing_when_every_replica_has_a_node_to_itself(cpus: list[float]) -> None:
    demands = [Demand(name=f"decode-{rank}", num_cpus=each) for rank, each in enumerate(cpus)]
    assert unplaceable(demands, [{"CPU": 1.0}] * len(cpus)) == []


@given(st.lists(st.floats(0.1, 4.0), max_size=12), st.floats(0.0, 8.0))
def test_what_one_node_holds_never_exceeds_it(cpus: list[float], node: float) -> None:
    demands = [Demand(name=f"decode-{rank}", num_cpus=each) for rank, each in enumerate(cpus)]
    missing = {line.partition(" ")[0] for line in unplaceable(demands, [{"CPU": node}])}
    placed = [demand.num_cpus for demand in demands if demand.name not in missing]
    assert sum(placed) <= node + 1e-3
