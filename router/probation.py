"""Requests that lost workers again and again go on one at a time, until each got further.

A request whose execution ends workers takes its neighbours along, and who ended the worker cannot
be seen from outside. So before its last chances it runs while no other such request does: if the
worker is lost then, it is the one that pays for it, and its neighbours do not.

wait       for the turn of this request
choose     workers, however long that takes
try        until it has a few new tokens, two seconds passed, or it failed
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from router.attempt import Deliver
from router.request import TokenBatch
from router.retry import Failure
from router.timeline import AttemptRecord
from router.worker_view import WorkerKey

PASSED_AFTER_TOKENS = 4
PASSED_AFTER_S = 2.0
NUM_LOST_KEPT = 256


class Turn:
    """The time of one request, or none: then nothing here has a meaning."""

    def __init__(self, line: asyncio.Lock | None = None) -> None:
        self._line = line
        self._num_tokens = 0
        self._timer: asyncio.TimerHandle | None = None
        self.workers: frozenset[WorkerKey] = frozenset()  # that it would be blamed for

    def begin(self, workers: Collection[WorkerKey]) -> None:
        """It runs on these workers now."""
        if self._line is not None:
            self.workers = frozenset(workers)
            self._timer = asyncio.get_running_loop().call_later(PASSED_AFTER_S, self.end)

    def counted(self, deliver: Deliver) -> Deliver:
        """Hand tokens on and see how far it gets."""

        def deliver_and_count(batch: TokenBatch, record: AttemptRecord) -> None:
            self._num_tokens += len(batch.token_ids)
            if self._num_tokens >= PASSED_AFTER_TOKENS:
                self.end()
            deliver(batch, record)

        return deliver if self._line is None else deliver_and_count

    def end(self) -> None:
        """Let the next one go; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self.workers = frozenset()
        if self._line is not None:
            line, self._line = self._line, None
            line.release()


class Probation:
    """Owns the line. Invariant: at most one turn runs."""

    def __init__(self) -> None:
        self._line = asyncio.Lock()
        self._turn = Turn()
        self._lost: OrderedDict[WorkerKey, Turn] = OrderedDict()  # in whose turn

    @asynccontextmanager
    async def turn(self, *, is_needed: bool) -> AsyncIterator[Turn]:
        """Wait until this request may go on, at once unless it is needed."""
        if not is_needed:
            yield Turn()
            return
        await self._line.acquire()
        turn = self._turn = Turn(self._line)
        try:
            yield turn
        finally:
            turn.end()

    def blames_other(self, failure: Failure, turn: Turn) -> bool:
        """Whether a request, with this turn, lost its worker in the turn of another one."""
        if failure.cause != "lost":
            return False
        for key in failure.workers & self._turn.workers:
            self._lost[key] = self._turn
        while len(self._lost) > NUM_LOST_KEPT:
            self._lost.popitem(last=False)
        return any(self._lost.get(key, turn) is not turn for key in failure.workers)
