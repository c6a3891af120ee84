"""Which prefill workers a decode worker should be linked to, from what the ingresses say."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kv_transfer.control import PeerInfo
from kv_transfer.place import REACHES, Place, is_within

VIEW_LIFETIME_S = 30.0
# What fits a cluster many times over; more is a mistake of whoever sends it.
MAX_VIEWS = 64
MAX_PEERS_PER_VIEW = 1024


@dataclass(frozen=True, slots=True)
class _View:
    peers: tuple[PeerInfo, ...]
    seen_at: float


class PeerViews:
    """The last view of each ingress. A peer that is missing from a view is not known to be dead."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._views: dict[str, _View] = {}

    def update(self, ingress_id: str, peers: Sequence[PeerInfo]) -> None:
        """Replace one ingress's view; ValueError when it is larger than any cluster."""
        if len(peers) > MAX_PEERS_PER_VIEW:
            raise ValueError(f"Got {len(peers)} peers but expected at most {MAX_PEERS_PER_VIEW}")
        self._views.pop(ingress_id, None)
        while len(self._views) >= MAX_VIEWS:
            del self._views[next(iter(self._views))]  # the oldest
        self._views[ingress_id] = _View(tuple(peers), self._now())

    def peers(self) -> dict[str, PeerInfo]:
        """Return the union of the fresh views, the highest incarnation of each id."""
        oldest = self._now() - VIEW_LIFETIME_S
        self._views = {id_: view for id_, view in self._views.items() if view.seen_at >= oldest}
        union: dict[str, PeerInfo] = {}
        for view in self._views.values():
            for peer in view.peers:
                known = union.get(peer.worker.worker_id)
                if known is None or known.worker.incarnation < peer.worker.incarnation:
                    union[peer.worker.worker_id] = peer
        return union


def choose_peers(
    peers: Iterable[PeerInfo],
    *,
    worker_id: str,
    place: Place,
    max_links: int,
    reach: str = "any",
    is_failing: Callable[[PeerInfo], bool] = lambda _: False,
) -> list[PeerInfo]:
    """Pick at most `max_links` within reach: near ones first, then by rendezvous hash.

    Failing ones come last. Same node is nearer than same zone, and that nearer than the rest.

    Each decode worker ranks the peers differently, so that links spread evenly, and one peer more
    or less changes at most one link of each worker.
    """

    def rank(peer: PeerInfo) -> tuple[bool, int, bytes]:
        nearness = REACHES.index(place.reach_to(peer.place))
        pair = f"{worker_id}\0{peer.worker.worker_id}"
        return is_failing(peer), -nearness, hashlib.blake2b(pair.encode(), digest_size=8).digest()

    reachable = (peer for peer in peers if is_within(place.reach_to(peer.place), reach))
    return sorted(reachable, key=rank)[:max_links]
