"""Who may start a stream on a worker, and how the running ones end when it drains.

A leg is one request on one worker, from its admission to the end of its stream. It counts as
waiting until the engine first schedules it; the count is kept here, so that admission is atomic and
never lags behind the engine's own report.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rpc.errors import (
    AdmissionRefusedError,
    DrainingError,
    StaleWorkerError,
    WorkerUnavailableError,
)

MIGRATE_BEFORE_END_S = 5.0  # left to the router to continue elsewhere what did not finish


def _do_nothing() -> None:
    """What an untold leg does about a migration."""


@dataclass(slots=True, eq=False)
class Leg:
    """One admitted request."""

    request_id: str
    is_waiting: bool = True
    is_migrating: bool = False  # the drain is over: the request shall go on somewhere else
    on_migrate: Callable[[], object] = _do_nothing  # ends what the leg waits for now

    def when_migrating(self, end: Callable[[], object]) -> None:
        """Call `end` at a migration, at once when it was told already."""
        self.on_migrate = end
        if self.is_migrating:
            end()

    def migrate(self) -> None:
        """Tell the leg to end soon."""
        self.is_migrating = True
        self.on_migrate()


class Admission:
    """Holds the legs of one worker. Invariant: none is added unless the state is `ready`."""

    def __init__(
        self,
        *,
        incarnation: int,
        max_waiting: int,
        retry_after_s: Callable[[], float],  # when a refused request may find room
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = "starting"
        self._incarnation = incarnation
        self._max_waiting = max_waiting
        self._retry_after_s = retry_after_s
        self._now = now
        self._legs: set[Leg] = set()
        self._changed = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Legs the engine has not scheduled yet."""
        return sum(leg.is_waiting for leg in self._legs)

    @property
    def num_legs(self) -> int:
        """All legs."""
        return len(self._legs)

    def open(self) -> None:
        """Accept requests from now on."""
        assert self.state == "starting", self.state
        self.state = "ready"

    def close(self) -> None:
        """Accept no more requests; the running ones go on."""
        self.state = "draining"

    @contextmanager
    def admit(self, request_id: str, *, incarnation: int) -> Iterator[Leg]:
        """Hold a leg for the block; a `WorkerError` says why this worker does not take it."""
        if incarnation != self._incarnation:
            raise StaleWorkerError(f"Got {incarnation = } but this process is {self._incarnation}")
        if self.state == "draining":
            raise DrainingError("this worker is about to stop")
        if self.state != "ready":
            raise WorkerUnavailableError("this worker is still starting")
        if self.num_waiting >= self._max_waiting:
            raise AdmissionRefusedError(
                f"{self.num_waiting} requests wait already", retry_after_s=self._retry_after_s()
            )
        leg = Leg(request_id)
        self._legs.add(leg)
        try:
            yield leg
        finally:
            self._legs.discard(leg)
            self._changed.set()

    async def drain(self, drain_s: float, *, is_busy: Callable[[], bool] = lambda: False) -> None:
        """Admit nothing more and wait for the legs; those left near the end are told to migrate."""
        self.close()
        end_s = self._now() + drain_s
        await self._wait_until_idle(end_s - MIGRATE_BEFORE_END_S, is_busy)
        for leg in tuple(self._legs):
            leg.migrate()
        await self._wait_until_idle(end_s, is_busy)

    async def _wait_until_idle(self, end_s: float, is_busy: Callable[[], bool]) -> None:
        while (self._legs or is_busy()) and (left_s := end_s - self._now()) > 0:
            self._changed.clear()
            try:
                # What makes a worker busy beside its legs announces no change: look again soon.
                async with asyncio.timeout(min(left_s, 0.1)):
                    await self._changed.wait()
            except TimeoutError:
                continue
