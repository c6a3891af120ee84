"""How many requests of a batch run at once: as many as the server takes without a refusal.

One more after each round of answers, half as many after a refusal, and none before the time the
server asked for. Requests that were on their way when the limit was cut do not cut it again.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

FIRST_LIMIT: Final = 4
FIRST_PAUSE_S: Final = 0.5  # where a refusal has no hint; doubles while all are refused
LONGEST_PAUSE_S: Final = 60.0


class Pacer:
    """Owns the places. Invariant: 1 <= limit <= most."""

    def __init__(self, most: int, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._most = most
        self.limit = float(min(FIRST_LIMIT, most))
        self.num_running = 0
        self._num_again = 0  # refused ones that wait; new ones let them go first
        self._not_before_s = 0.0
        self._cut_at_s = float("-inf")
        self._num_pauses = 0  # since the last answer
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def place(self, *, is_again: bool = False) -> AsyncIterator[float]:
        """Wait for a place and hold it; gives the time it was taken."""
        self._num_again += is_again
        try:
            await self._wait(is_again)
        finally:
            self._num_again -= is_again
            self._changed.set()
        self.num_running += 1
        try:
            yield self._now()
        finally:
            self.num_running -= 1
            self._changed.set()

    async def _wait(self, is_again: bool) -> None:
        while (wait_s := self.wait_s(is_again=is_again)) != 0.0:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()

    def wait_s(self, *, is_again: bool = False) -> float | None:
        """How long until a request may leave; 0: now, None: until something changes."""
        if self.num_running >= int(self.limit) or (self._num_again and not is_again):
            return None
        return max(self._not_before_s - self._now(), 0.0)

    def answered(self) -> None:
        """A request came to an end, whichever."""
        self._num_pauses = 0
        self.limit = min(self.limit + 1.0 / self.limit, float(self._most))
        self._changed.set()

    def refused(self, sent_at_s: float, retry_after_s: float | None) -> None:
        """The server had no room for a request sent at that time."""
        if sent_at_s >= self._cut_at_s:
            self.limit = max(self.limit / 2.0, 1.0)
            self._cut_at_s = self._now()
            self._num_pauses += 1
        own_s = FIRST_PAUSE_S * 2.0 ** min(self._num_pauses - 1, 10)
        pause_s = min(own_s if retry_after_s is None else retry_after_s, LONGEST_PAUSE_S)
        self._not_before_s = max(self._not_before_s, self._now() + pause_s)

    def check_integrity(self) -> None:
        """Nothing runs that has no place."""
        assert 1.0 <= self.limit <= self._most
        assert self.num_running >= 0
