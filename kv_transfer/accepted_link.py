"""A ready link as its prefill worker uses it: checks tickets, posts sends in their order."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from kv_transfer.control import FetchOrder, FetchReply, WorkerRef
from kv_transfer.link import Link
from kv_transfer.live_link import LiveLink
from kv_transfer.tickets import TicketCheck, TicketGate


class AcceptedLink:
    """One generation of the link to one decode worker.

    Invariant: a granted order is answered the same again and posted once.
    """

    def __init__(self, live: LiveLink, *, decode_worker: WorkerRef, generation: int) -> None:
        self.live = live
        self.decode_worker = decode_worker
        self.generation = generation
        self._gate = TicketGate()
        self._last_reply: asyncio.Future[FetchReply] | None = None

    @property
    def is_usable(self) -> bool:
        """Whether the link lives."""
        return not self.live.ended.done()

    def check(self, order: FetchOrder) -> TicketCheck:
        """Say what an order means here; a conflict ends the link."""
        check = self._gate.check(order)
        if check is TicketCheck.CONFLICT:
            self.live.fail(f"ticket {order.ticket} is out of order")
        return check

    def grant(
        self, order: FetchOrder, job: Callable[[Link], int], reply: "asyncio.Future[FetchReply]"
    ) -> "asyncio.Future[int]":
        """Use the ticket and post the operation; returns what it will have sent."""
        self._gate.grant(order)
        self._last_reply = reply
        return self.live.run(job)

    async def last_reply(self) -> FetchReply:
        """Answer a repeated order as it was answered before."""
        assert self._last_reply is not None, "nothing was granted yet"
        return await asyncio.shield(self._last_reply)


class LinkSource(Protocol):
    """Where a sender finds the link an order names; `LinkAcceptor` is one."""

    def link_for(self, decode_worker: WorkerRef, generation: int) -> AcceptedLink | None:
        """Return the live link of exactly this process and generation."""
