"""Sends a plan: by the clock, whatever the server does, or from so many clients in a loop."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from load_generator.outcome import Ending, Outcome
from load_generator.planned_request import PlannedRequest


class Asker(Protocol):
    """Whoever asks a server."""

    async def ask(self, request: PlannedRequest, due_s: float) -> Outcome:
        """Send a request and read its answer."""
        ...


@dataclass(slots=True, kw_only=True)
class Run:
    """A plan that was sent."""

    outcomes: list[Outcome] = field(default_factory=list)
    started_s: float = 0.0  # of the clock of its outcomes
    ended_s: float = 0.0
    client_cpu_s: float = 0.0  # processor time of this process meanwhile
    events: list[str] = field(default_factory=list)  # what was done to the server

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last end."""
        return self.ended_s - self.started_s

    def joined(self, later: "Run") -> "Run":
        """Both, as if no time lay between them."""
        return Run(
            outcomes=[*self.outcomes, *later.outcomes],
            started_s=self.started_s,
            ended_s=self.ended_s + later.duration_s,
            client_cpu_s=self.client_cpu_s + later.client_cpu_s,
            events=[*self.events, *later.events],
        )


class Sender:
    """Sends one plan.

    Open arrivals: each request is due at a time of its own and no answer delays the next one; a
    latency counts from when a request was due, however late it left, and waiting for a place
    under `max_concurrency` counts too. Closed arrivals: so many clients, each asks again when it
    was answered.
    """

    def __init__(
        self,
        asker: Asker,
        *,
        max_concurrency: int | None = None,
        is_closed: bool = False,
        half_way: Callable[[], Awaitable[str]] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._asker = asker
        self._max_concurrency = max_concurrency
        self._is_closed = is_closed
        self._half_way = half_way
        self._now = now
        self._run = Run()
        self._num_left = 0  # until half of the plan was sent
        self._is_half_way = asyncio.Event()
        self._place = asyncio.Semaphore(max_concurrency or 2**31)

    async def send(self, plan: Sequence[PlannedRequest]) -> Run:
        """Send all of it and wait for the last answer."""
        run = self._run
        self._num_left = len(plan) // 2
        run.started_s, cpu_s = self._now(), time.process_time()
        async with asyncio.TaskGroup() as group:
            if self._half_way is not None:
                group.create_task(self._disturb(self._half_way))
            if self._is_closed:
                requests = iter(plan)
                for _ in range(self._max_concurrency or 1):
                    group.create_task(self._loop(requests))
            else:
                await self._send_by_clock(plan, group)
        run.ended_s = max(outcome.ended_s for outcome in run.outcomes)
        run.client_cpu_s = time.process_time() - cpu_s
        return run

    async def _send_by_clock(
        self, plan: Sequence[PlannedRequest], group: asyncio.TaskGroup
    ) -> None:
        for request in plan:
            due_s = self._run.started_s + request.due_s
            if (early_s := due_s - self._now()) > 0:
                await asyncio.sleep(early_s)
            group.create_task(self._ask(request, due_s))

    async def _loop(self, requests: Iterator[PlannedRequest]) -> None:
        for request in requests:
            await self._ask(request, self._now())

    async def _ask(self, request: PlannedRequest, due_s: float) -> None:
        async with self._place:
            self._num_left -= 1
            if self._num_left <= 0:
                self._is_half_way.set()
            outcome = await self._asker.ask(request, due_s)
        self._run.outcomes.append(outcome)
        if outcome.ending is Ending.CANCELLED and request.resends:
            again = replace(request, cancel_after_tokens=None, resends=False)
            await self._ask(again, self._now())

    async def _disturb(self, half_way: Callable[[], Awaitable[str]]) -> None:
        await self._is_half_way.wait()
        self._run.events.append(await half_way())
