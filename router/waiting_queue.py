"""Where requests wait while no choice of workers exists: in a fair order, bounded.

Requests that were admitted once and lost their worker go first and are never refused.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from router.drain_rate import DrainRate, retry_after_s
from router.errors import QueueFull
from router.fair_line import FairLine, Ticket
from router.request import Tenant

ChoiceT = TypeVar("ChoiceT")

WORST_CLASS = 2
# A prediction may be this many times too pessimistic before a deadline counts as hopeless.
HOPELESS_FACTOR = 2.0


@dataclass(slots=True, eq=False)
class _Turn:
    """How one waiter is told."""

    event: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: QueueFull | None = None  # it must leave


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Who asks for a choice."""

    tenant: Tenant
    priority: int  # its class: 0 goes first
    num_tokens: int  # what a turn is charged to the tenant
    is_admitted: bool  # was served before and lost its worker


class WaitingQueue(Generic[ChoiceT]):
    """Gives turns in order.

    Invariants: only the head tries, a turn is never lost (a leaver passes it on), and no new
    request overtakes one of its class or a better one that waits.
    """

    def __init__(
        self,
        *,
        limit: Callable[[], int],  # of each class
        expected_turn_s: Callable[[], float],  # between two turns, while none was seen
        now: Callable[[], float],
    ) -> None:
        self._limit = limit
        self._expected_turn_s = expected_turn_s
        self._now = now
        self._again: deque[_Turn] = deque()
        self._new: FairLine[_Turn] = FairLine()
        self._drain = DrainRate()

    def __len__(self) -> int:
        return len(self._again) + len(self._new)

    @property
    def num_tokens(self) -> int:
        """Of the new requests that wait."""
        return self._new.num_tokens

    def must_wait(self, place: Place) -> bool:
        """Whether others are before it, so that it cannot have a choice at once."""
        if self._again:
            return True
        return not place.is_admitted and self._new.num_before(place.priority) > 0

    async def take(
        self, try_pick: Callable[[], ChoiceT | None], place: Place, *, timeout_s: float
    ) -> ChoiceT:
        """Return a choice as soon as it is this request's turn and one exists.

        QueueFull when too many wait already or the deadline would pass meanwhile, TimeoutError
        when it has passed.
        """
        if not self.must_wait(place) and (choice := try_pick()) is not None:
            self._charge(place)
            return choice
        turn = _Turn()
        leave = self._join(turn, place, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                choice = await self._wait(try_pick, turn)
        finally:
            leave()
            self.wake()
        self._charge(place)
        self._drain.note_turn(self._now())
        return choice

    def has_room(self, tenant: Tenant, priority: int) -> bool:
        """Whether `take` may do more than refuse a new request of this tenant and class."""
        new = Place(tenant=tenant, priority=priority, num_tokens=0, is_admitted=False)
        return not (
            self.must_wait(new) and self._new.refuses(tenant.name, priority, limit=self._limit())
        )

    def wake(self) -> None:
        """A choice may exist now: the head tries."""
        if (head := self._head()) is not None:
            head.event.set()

    def charge(self, tenant: Tenant, num_tokens: int) -> None:
        """A tenant was served these tokens beyond what its turn said."""
        self._new.charge(tenant.name, num_tokens / tenant.weight)

    def retry_after_s(self, priority: int = WORST_CLASS) -> float:
        """When a new request of this class should find room."""
        return retry_after_s(self._wait_s(priority))

    def _wait_s(self, priority: int) -> float:
        num_before = len(self._again) + self._new.num_before(priority)
        return self._drain.wait_s(
            num_before + 1, now_s=self._now(), expected_turn_s=self._expected_turn_s()
        )

    def _charge(self, place: Place) -> None:
        if not place.is_admitted:
            self.charge(place.tenant, place.num_tokens)

    def _head(self) -> _Turn | None:
        if self._again:
            return self._again[0]
        ticket = self._new.head()
        return ticket.item if ticket is not None else None

    def _join(self, turn: _Turn, place: Place, timeout_s: float) -> Callable[[], object]:
        """Stand in line; returns how to leave it."""
        if place.is_admitted:
            self._again.append(turn)
            return lambda: self._again.remove(turn)
        hint_s = self.retry_after_s(place.priority)
        num_before = self._new.num_before(place.priority)
        if num_before and self._wait_s(place.priority) > HOPELESS_FACTOR * timeout_s:
            raise QueueFull(f"the deadline passes while {num_before} requests wait", hint_s)
        ticket = Ticket(
            item=turn,
            tenant=place.tenant.name,
            priority=place.priority,
            num_tokens=place.num_tokens,
        )
        victim = self._new.add(ticket, limit=self._limit())
        refusal = QueueFull(f"{num_before} requests wait already", hint_s)
        if victim is ticket:
            raise refusal
        if victim is not None:
            victim.item.refusal = refusal
            victim.item.event.set()
        return lambda: self._new.remove(ticket)

    async def _wait(self, try_pick: Callable[[], ChoiceT | None], turn: _Turn) -> ChoiceT:
        while True:
            await turn.event.wait()
            turn.event.clear()
            if turn.refusal is not None:
                raise turn.refusal
            # Somebody of a better class may stand in front by now.
            if self._head() is turn and (choice := try_pick()) is not None:
                return choice
