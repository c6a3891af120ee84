"""A scenario: clients ask, things happen, and then everything must be as it should."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from tests.chaos.cluster import Footprint, LiveCluster, Worker
from tests.chaos.load import ASIDE, CANARY, Answer, Load, ask

WATCH_EVERY_S = 1.0
TOLD_ROUTES = 256  # as many as an ingress remembers
USUAL = Load()
STRUCK = "struck"  # what the faults of a scenario are filed under
METRICS = ("relevo_kv_digest_mismatches_total", "relevo_preemptions_total")


class Event(Protocol):
    """Something that happens while clients ask."""

    async def happen(self, stage: "Stage") -> None:
        """Return when it has happened, or has begun to last."""
        ...


Check = Callable[["Stage"], Awaitable[None]]  # AssertionError when something is wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is asked, what happens meanwhile, and what must hold beside what always must."""

    name: str
    rows: Sequence[str]  # of the table of threats that it shows
    events: Sequence[Event]
    checks: Sequence[Check] = ()
    load: Load = USUAL
    may_fail: frozenset[str] = frozenset()  # labels of requests that the events doom
    may_refuse: bool = False  # it overloads the cluster
    has_spare: bool = True  # at any time one worker of each pool is well
    quiet_s: float = 3.0  # what it takes on a quiet machine
    is_core: bool = False  # part of every subset


class Truths:
    """What an undisturbed run answers, asked once for each question."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], dict[str, Any]] = {}

    async def learn(self, http: httpx.AsyncClient, load: Load) -> None:
        for question in load.questions:
            key = (question, load.num_tokens)
            if key not in self._known:
                answer = Answer(*key)
                await ask(http, answer)
                assert answer.is_complete, answer
                self._known[key] = answer.tells()

    def of(self, answer: Answer) -> dict[str, Any]:
        return self._known[answer.question, answer.num_tokens]


@dataclass(slots=True)
class Stage:
    """One run of one scenario, as its events and checks see it."""

    scenario: Scenario
    cluster: LiveCluster
    rng: random.Random
    truths: Truths
    answers: list[Answer] = field(default_factory=list)  # those that still run included
    extra: list[Answer] = field(default_factory=list)  # asked for by events
    victims: list[Worker] = field(default_factory=list)
    blows_s: list[float] = field(default_factory=list)  # when each victim was struck
    num_attempts: dict[str, int] = field(default_factory=dict)  # by request id
    first_routes: dict[str, dict[str, Any]] = field(default_factory=dict)  # by request id
    workers: list[Worker] = field(default_factory=list)  # before it began
    footprints: dict[int, Footprint] = field(default_factory=dict)  # before it began
    metrics: dict[str, float] = field(default_factory=dict)  # before it began
    asking: asyncio.Task[None] | None = None  # the load, while it runs
    quiet_after_s: float = 0.0
    ended_at_s: float = 0.0  # when the last client had its last event

    async def run(self) -> None:
        """From a whole cluster to the last event of the last client."""
        await self.cluster.until_whole()
        for load in (self.scenario.load, CANARY, Load(questions=[ASIDE])):
            await self.truths.learn(self.cluster.http, load)
        self.workers = await self.cluster.workers()
        self.footprints = await self.cluster.footprints()
        self.metrics = {name: await self.cluster.metric(name) for name in METRICS}
        async with self._watched(), self._loaded():
            for event in self.scenario.events:
                await event.happen(self)
            self.cluster.heal()
        self.ended_at_s = time.monotonic()

    @property
    def all_answers(self) -> list[Answer]:
        return [*self.answers, *self.extra]

    @property
    def affected(self) -> list[Answer]:
        """Those that went on with other workers than they began with."""
        return [each for each in self.all_answers if self.num_attempts.get(each.request_id, 1) > 1]

    @property
    def recoveries_s(self) -> list[float]:
        """How long each of those stood still around the blow that hit it."""
        stalls_s = [
            max((each.stall_over_s(blow_s) for blow_s in self.blows_s), default=0.0)
            for each in self.affected
        ]
        # Struck by a fault point, whose moment only the worker knows.
        return stalls_s if self.blows_s else [each.longest_stall_s for each in self.affected]

    def strike(self, victim: Worker) -> None:
        """Note whom a blow hits, just before it does."""
        self.victims.append(victim)
        self.blows_s.append(time.monotonic())

    @contextlib.asynccontextmanager
    async def _loaded(self) -> AsyncIterator[None]:
        is_over, url = asyncio.Event(), self.cluster.served.url
        asking = asyncio.create_task(self.scenario.load.run(url, is_over, self.answers))
        singing = asyncio.create_task(CANARY.run(url, is_over, self.answers))
        self.asking = asking
        try:
            yield
        finally:
            self.cluster.heal()
            if self.scenario.load.num_requests is None:
                is_over.set()
            await asking
            is_over.set()
            await singing

    @contextlib.asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        """Follow what the ingress decides: it forgets."""
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await self.note_routes()

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                await self.note_routes()
            await asyncio.sleep(WATCH_EVERY_S)

    async def note_routes(self) -> None:
        """Take what the ingress remembers of its decisions."""
        for route in (await self.cluster.status(TOLD_ROUTES))["routes"]:
            request_id, attempt = route["request_id"], route["attempt"]
            self.num_attempts[request_id] = max(self.num_attempts.get(request_id, 0), attempt)
            if attempt == 1:
                self.first_routes[request_id] = route
