"""How much of all work may be retries: a fifth of the requests, and a few on top.

Workers that answer requests with errors must not be asked four times as often for it. Requests
whose worker died, froze or drains are not counted: each such loss costs its streams one attempt,
and none may be refused it (`migration_limit` bounds a request that takes its workers down).
"""

from collections.abc import Callable

SHARE = 0.2  # retries that each new request allows
FLOOR = 10.0  # retries that need no requests
FLOOR_PER_S = 1.0  # how fast the floor fills again
MOST = 100.0  # saved up in calm times


class RetryQuota:
    """Shared by all requests of a router.

    Invariant: retries <= SHARE x requests + FLOOR + FLOOR_PER_S x seconds, since the start.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._left = FLOOR
        self._filled_at_s = now()

    def note_request(self) -> None:
        """A new request came."""
        self._left = min(self._left + SHARE, MOST)

    def take(self) -> bool:
        """Whether one more retry is allowed; it counts then."""
        now_s = self._now()
        if self._left < FLOOR:
            refill = FLOOR_PER_S * (now_s - self._filled_at_s)
            self._left = min(self._left + refill, FLOOR)
        self._filled_at_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
