"""Which workers a session belongs to: the same in every router, and mostly the same after changes.

Each worker stands at some places of a ring; a session belongs to the next one after its own place.
"""

import hashlib
from bisect import bisect
from collections.abc import Iterable, Sequence

from router.worker_view import Pools, WorkerKey, WorkerView

PLACES = 16  # of one worker


class SessionRing:
    """Owns one ring per pool, made anew when its workers are others."""

    def __init__(self) -> None:
        self._rings: dict[str, _Ring] = {}

    def workers(self, session_key: str, pools: Pools) -> frozenset[WorkerKey]:
        """The session's worker of each pool; none without a key."""
        if not session_key:
            return frozenset()
        place = _place(session_key)
        owners = [self._owner(place, views) for views in (pools.prefill, pools.decode) if views]
        return frozenset(owners)

    def _owner(self, place: int, views: Sequence[WorkerView]) -> WorkerKey:
        keys = {view.key for view in views}
        ring = self._rings.get(views[0].pool)
        if ring is None or ring.keys != keys:
            ring = self._rings[views[0].pool] = _Ring(keys)
        return ring.owner(place)


class _Ring:
    def __init__(self, keys: Iterable[WorkerKey]) -> None:
        self.keys = set(keys)
        # A worker keeps its places when its process is replaced.
        places = [
            (_place(f"{key.worker_id}/{number}"), key)
            for key in self.keys
            for number in range(PLACES)
        ]
        places.sort()
        self._places = [place for place, _ in places]
        self._owners = [key for _, key in places]

    def owner(self, place: int) -> WorkerKey:
        return self._owners[bisect(self._places, place) % len(self._owners)]


def _place(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
