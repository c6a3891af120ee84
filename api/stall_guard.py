"""Ends a task whose writes a client leaves lying."""

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import Self

from api.errors import ApiError, Verdict


class StallGuard:
    """Owns one timer for all writes of a stream: a timer for each would cost more than they do.

    Invariant: it goes off when a write has taken `limit_s`, no earlier and no later.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._began_s: float | None = None  # of the write that is on its way
        self._is_stalled = False
        self._timer = self._loop.call_later(limit_s, self._look)

    async def watch(self, write: Awaitable[None]) -> None:
        """Wait for a write to end; the guard's block raises ApiError when it does not."""
        self._began_s = self._loop.time()
        try:
            await write
        finally:
            self._began_s = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if not self._is_stalled:
            return
        assert self._task is not None
        # Whoever else cancels the task at the same time is obeyed.
        if self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ApiError(Verdict.CANCELLED, "The client stopped reading") from error

    def _look(self) -> None:
        now_s = self._loop.time()
        since_s = now_s if self._began_s is None else self._began_s
        if now_s - since_s >= self._limit_s and self._task is not None:
            self._is_stalled = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_at(since_s + self._limit_s, self._look)
