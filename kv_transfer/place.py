"""Where a worker runs, and how far two workers are apart."""

from typing import NamedTuple

ZONE_LABEL = "ray.io/availability-zone"  # of a node; Ray's own name, which KubeRay fills in
REACHES = ("any", "zone", "node")  # how far a link may go; the later the nearer


class Place(NamedTuple):
    """One node; where nothing is known of a zone, all such nodes are in one."""

    node_id: str = ""
    zone: str = ""

    def reach_to(self, other: "Place") -> str:
        """The narrowest of REACHES that holds both."""
        if self.node_id and self.node_id == other.node_id:
            return "node"
        return "zone" if self.zone == other.zone else "any"


NOWHERE = Place()  # nothing is known


def is_within(distance: str, reach: str) -> bool:
    """Whether a link that goes so far is allowed."""
    return REACHES.index(distance) >= REACHES.index(reach)
