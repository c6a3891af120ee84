"""Whether every replica finds a node: says what is missing before somebody waits for it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_EPSILON = 1e-6  # fractions of a CPU add up with rounding errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One replica's share of a node."""

    name: str  # such as decode-0
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    max_per_node: int | None = None  # of the same deployment
    node_labels: Mapping[str, str] = field(default_factory=dict)  # all of them on its node

    @property
    def deployment(self) -> str:
        """The name without its rank."""
        return self.name.rpartition("-")[0]


@dataclass(slots=True)
class _Room:
    """What is left of one node."""

    num_cpus: float
    num_gpus: float
    labels: Mapping[str, str]
    deployments: Counter[str]  # how many replicas of each it has

    def fits(self, demand: Demand) -> bool:
        return (
            demand.num_cpus <= self.num_cpus + _EPSILON
            and demand.num_gpus <= self.num_gpus + _EPSILON
            and not self.is_full_of(demand)
            and self.has_labels(demand)
        )

    def is_full_of(self, demand: Demand) -> bool:
        most = demand.max_per_node
        return most is not None and self.deployments[demand.deployment] >= most

    def has_labels(self, demand: Demand) -> bool:
        return demand.node_labels.items() <= self.labels.items()

    def take(self, demand: Demand) -> None:
        self.num_cpus -= demand.num_cpus
        self.num_gpus -= demand.num_gpus
        self.deployments[demand.deployment] += 1


def unplaceable(
    demands: Sequence[Demand],
    nodes: Sequence[Mapping[str, float]],
    *,
    labels: Sequence[Mapping[str, str]] = (),
) -> list[str]:
    """One line per replica that finds no node.

    `nodes` are resource tables as Ray gives them, `labels` the labels of each (empty: none).

    First fit, the largest first: on one node exact, on several what a scheduler would find too,
    up to rare cases of bad packing.
    """
    rooms = [
        _Room(node.get("CPU", 0.0), node.get("GPU", 0.0), of_node, Counter())
        for node, of_node in zip(nodes, labels or [{}] * len(nodes), strict=True)
    ]
    lines = []
    for demand in sorted(demands, key=lambda each: (-each.num_gpus, -each.num_cpus, each.name)):
        room = next((room for room in rooms if room.fits(demand)), None)
        if room is None:
            lines.append(_missing(demand, rooms))
        else:
            room.take(demand)
    return lines


def _missing(demand: Demand, rooms: Sequence[_Room]) -> str:
    rooms = [room for room in rooms if room.has_labels(demand)]
    if demand.node_labels and not rooms:
        labels = ", ".join(f"{key}={value}" for key, value in demand.node_labels.items())
        return f"{demand.name} needs a node with the labels {labels}, and there is none"
    if rooms and all(room.is_full_of(demand) for room in rooms):
        return (
            f"{demand.name} needs another node: all {len(rooms)} have as many"
            f" as {demand.deployment}.max_per_node allows, {demand.max_per_node}"
        )
    for kind, wanted, key in (
        ("GPU", demand.num_gpus, "num_gpus"),
        ("CPU", demand.num_cpus, "num_cpus"),
    ):
        most = max((getattr(room, key) for room in rooms), default=0.0)
        if wanted > most + _EPSILON:
            return f"{demand.name} needs {wanted:g} {kind}, but no node has more than {most:g} left"
    return f"{demand.name} needs {demand.num_cpus:g} CPU and {demand.num_gpus:g} GPU on one node"
