"""Where the workers of both pools should run, as far as Serve lets one choose; a pure function.

What Serve lets one choose is the same for every replica of a pool: labels that its nodes must have,
and how many may share a node. Who goes where is Ray's decision within that. So the plan has

    zone           both pools in one zone, where links may not leave it (`kv_transfer.reach`)
    most per node  so many that the loss of any one node can be made good on the others, no more

and the assignment that a scheduler finds which spreads each pool over the nodes, and sets a worker
beside one of the other pool where it can: that one is expected, not ordered.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kv_transfer.place import ZONE_LABEL

_EPSILON = 1e-6  # fractions of a CPU add up with rounding errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node with what it has."""

    node_id: str
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def zone(self) -> str:
        """Empty where nothing is known of one."""
        return self.labels.get(ZONE_LABEL, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNeed:
    """The workers of one pool, all alike."""

    name: str
    num_workers: int
    num_cpus: float = 0.0  # of each
    num_gpus: float = 0.0
    node_labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlace:
    """What Serve is told of a pool."""

    node_labels: Mapping[str, str]
    max_per_node: int | None  # None: as many as fit


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """Both pools. Invariant: no node is expected to hold more than it has."""

    pools: Mapping[str, PoolPlace]
    expected: Mapping[str, str]  # worker, such as decode-0 -> node; those that find one
    reasons: Sequence[str]  # for people, a line each


def plan_placement(
    nodes: Sequence[Node], pools: Sequence[PoolNeed], *, reach: str
) -> PlacementPlan:
    """Decide for the nodes there are now; with none nothing is decided."""
    reasons: list[str] = []
    zone = _choose_zone(nodes, pools, reasons) if reach != "any" else None
    places: dict[str, PoolPlace] = {}
    for pool in pools:
        labels = dict(pool.node_labels)
        if zone:
            labels.setdefault(ZONE_LABEL, zone)
        eligible = [node for node in nodes if labels.items() <= node.labels.items()]
        limit = _most_per_node(pool, eligible)
        places[pool.name] = PoolPlace(node_labels=labels, max_per_node=limit)
        if limit is not None:
            reasons.append(
                f"{pool.name}: at most {limit} of {pool.num_workers} workers on each of"
                f" {len(eligible)} nodes, so that the others can make up for any one"
            )
    expected = _assign(nodes, pools, places)
    reasons += _explain(nodes, pools, expected, reach)
    return PlacementPlan(pools=places, expected=expected, reasons=reasons)


def _choose_zone(
    nodes: Sequence[Node], pools: Sequence[PoolNeed], reasons: list[str]
) -> str | None:
    """The zone that holds both pools and has the most room; None when none does."""
    zones = sorted({node.zone for node in nodes})
    if len(zones) < 2:
        return None
    free = {pool.name: PoolPlace(node_labels=pool.node_labels, max_per_node=None) for pool in pools}
    num_workers = sum(pool.num_workers for pool in pools)
    fitting = [
        zone
        for zone in zones
        if zone and len(_assign([n for n in nodes if n.zone == zone], pools, free)) == num_workers
    ]
    if not fitting:
        reasons.append(f"no zone of {', '.join(zones)} holds both pools: links stay inside each")
        return None
    room = {
        zone: (
            sum(node.num_gpus for node in nodes if node.zone == zone),
            sum(node.num_cpus for node in nodes if node.zone == zone),
        )
        for zone in fitting
    }
    best = max(fitting, key=lambda zone: room[zone])
    reasons.append(f"both pools in zone {best}, which holds all of them: links may not leave it")
    return best


def _most_per_node(pool: PoolNeed, eligible: Sequence[Node]) -> int | None:
    num_nodes = sum(_fits(pool, node.num_cpus, node.num_gpus) for node in eligible)
    # With two nodes the one that is left must be able to take all.
    if num_nodes < 3 or pool.num_workers < 2:
        return None
    return -(-pool.num_workers // (num_nodes - 1))


def _fits(pool: PoolNeed, num_cpus: float, num_gpus: float) -> bool:
    return pool.num_cpus <= num_cpus + _EPSILON and pool.num_gpus <= num_gpus + _EPSILON


def _assign(
    nodes: Sequence[Node], pools: Sequence[PoolNeed], places: Mapping[str, PoolPlace]
) -> dict[str, str]:
    """Each worker in turn to the node with the fewest of its pool, then beside the other pool."""
    cpus = {node.node_id: node.num_cpus for node in nodes}
    gpus = {node.node_id: node.num_gpus for node in nodes}
    held: Counter[tuple[str, str]] = Counter()  # (node or zone, pool)
    expected: dict[str, str] = {}
    for pool, number in _turns(pools):
        place = places[pool.name]
        open_nodes = [
            node
            for node in nodes
            if _fits(pool, cpus[node.node_id], gpus[node.node_id])
            and place.node_labels.items() <= node.labels.items()
            and (place.max_per_node is None or held[node.node_id, pool.name] < place.max_per_node)
        ]
        if not open_nodes:
            continue

        def rank(node: Node, name: str = pool.name) -> tuple[int, int, int, str]:
            others = sum(held[node.node_id, other.name] for other in pools if other.name != name)
            spread = held[node.node_id, name], held[f"zone {node.zone}", name]
            return (*spread, -others, node.node_id)

        node = min(open_nodes, key=rank)
        expected[f"{pool.name}-{number}"] = node.node_id
        cpus[node.node_id] -= pool.num_cpus
        gpus[node.node_id] -= pool.num_gpus
        held[node.node_id, pool.name] += 1
        held[f"zone {node.zone}", pool.name] += 1
    return expected


def _turns(pools: Sequence[PoolNeed]) -> Iterable[tuple[PoolNeed, int]]:
    """Every worker, the pools in turn by their shares: the larger ones of a share first."""
    turns = [
        ((number + 1) / pool.num_workers, -pool.num_gpus, -pool.num_cpus, pool.name, pool, number)
        for pool in pools
        for number in range(pool.num_workers)
    ]
    for *_, pool, number in sorted(turns, key=lambda turn: turn[:4]):
        yield pool, number


def _explain(
    nodes: Sequence[Node],
    pools: Sequence[PoolNeed],
    expected: Mapping[str, str],
    reach: str,
) -> list[str]:
    """Which nodes are expected to get whom, and who would be out of reach of everybody."""
    lines = []
    if len(nodes) > 1:
        for node in nodes:
            names = [worker for worker, node_id in expected.items() if node_id == node.node_id]
            if names:
                zone = f" ({node.zone})" if node.zone else ""
                lines.append(f"expected on {node.node_id[:8]}{zone}: {', '.join(sorted(names))}")
    if len(pools) > 1 and all(pool.num_workers for pool in pools):
        lines += _alone(nodes, expected, reach)
    return lines


def _alone(nodes: Sequence[Node], expected: Mapping[str, str], reach: str) -> list[str]:
    zones = {node.node_id: node.zone for node in nodes}

    def area(worker: str) -> str:
        node_id = expected[worker]
        return {"any": "", "zone": zones[node_id], "node": node_id}[reach]

    areas: dict[str, set[str]] = {}
    for worker in expected:
        areas.setdefault(worker.rpartition("-")[0], set()).add(area(worker))
    return [
        f"{worker} may find no partner within its {reach} (kv_transfer.reach)"
        for worker in sorted(expected)
        if any(area(worker) not in found for found in areas.values())
    ]
