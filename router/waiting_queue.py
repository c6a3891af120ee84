"""Where requests wait while no choice of workers exists: first come, first served, bounded.

Requests that were admitted once and lost their worker go first and are never refused.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from router.errors import QueueFull

ChoiceT = TypeVar("ChoiceT")


class WaitingQueue(Generic[ChoiceT]):
    """Gives turns in order.

    Invariants: only the head tries, a turn is never lost (a leaver passes it on), and no new
    request overtakes one that waits.
    """

    def __init__(self, *, limit: Callable[[], int], retry_after_s: Callable[[], float]) -> None:
        self._limit = limit
        self._retry_after_s = retry_after_s
        self._again: deque[asyncio.Event] = deque()
        self._new: deque[asyncio.Event] = deque()

    def __len__(self) -> int:
        return len(self._again) + len(self._new)

    async def take(
        self, try_pick: Callable[[], ChoiceT | None], *, timeout_s: float, is_admitted: bool
    ) -> ChoiceT:
        """Return a choice as soon as it is this request's turn and one exists.

        QueueFull when too many wait already, TimeoutError when the time is over.
        """
        if not self._must_wait(is_admitted) and (choice := try_pick()) is not None:
            return choice
        if not is_admitted and len(self._new) >= self._limit():
            raise QueueFull(f"{len(self._new)} requests wait already", self._retry_after_s())
        return await self._wait(try_pick, timeout_s, self._again if is_admitted else self._new)

    def wake(self) -> None:
        """A choice may exist now: the head tries."""
        if (head := self._head()) is not None:
            head.set()

    def _must_wait(self, is_admitted: bool) -> bool:
        return bool(self._again) or (bool(self._new) and not is_admitted)

    def _head(self) -> asyncio.Event | None:
        for line in (self._again, self._new):
            if line:
                return line[0]
        return None

    async def _wait(
        self,
        try_pick: Callable[[], ChoiceT | None],
        timeout_s: float,
        line: deque[asyncio.Event],
    ) -> ChoiceT:
        turn = asyncio.Event()
        line.append(turn)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    await turn.wait()
                    turn.clear()
                    # A newcomer of the other line may stand in front by now.
                    if self._head() is turn and (choice := try_pick()) is not None:
                        return choice
        finally:
            line.remove(turn)
            self.wake()
