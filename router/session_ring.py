"""Which workers a session belongs to: the same in every router, and mostly the same after changes.

Each worker stands at some places of a ring; a session belongs to the next one after its own place.
"""

import hashlib
from bisect import bisect
from collections.abc import Iterable

from router.pools import Pools
from router.worker_view import WorkerKey

PLACES = 16  # of one worker


class SessionRing:
    """Owns one ring per pool, made anew when its workers are others."""

    def __init__(self) -> None:
        self._rings: list[_Ring] = []
        self._made_for: tuple[Pools, int] | None = None

    def workers(self, session_key: str, pools: Pools) -> frozenset[WorkerKey]:
        """The session's worker of each pool; none without a key."""
        if not session_key:
            return frozenset()
        if (pools, pools.num_memberships) != self._made_for:
            self._made_for = (pools, pools.num_memberships)
            views_of_pools = [views for views in (pools.prefill, pools.decode) if views]
            self._rings = [_Ring(view.key for view in views) for views in views_of_pools]
        place = _place(session_key)
        return frozenset(ring.owner(place) for ring in self._rings)


class _Ring:
    def __init__(self, keys: Iterable[WorkerKey]) -> None:
        # A worker keeps its places when its process is replaced.
        places = [
            (_place(f"{key.worker_id}/{number}"), key) for key in keys for number in range(PLACES)
        ]
        places.sort()
        self._places = [place for place, _ in places]
        self._owners = [key for _, key in places]

    def owner(self, place: int) -> WorkerKey:
        return self._owners[bisect(self._places, place) % len(self._owners)]


def _place(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
