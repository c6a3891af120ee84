"""A ready link as its prefill worker uses it: checks tickets, posts sends in their order."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from kv_transfer.backend_choice import BackendChoice
from kv_transfer.control import FetchOrder, FetchReply, WorkerRef
from kv_transfer.link import Link
from kv_transfer.live_link import LiveLink
from kv_transfer.moved_range import MovedRange
from kv_transfer.tickets import TicketCheck, TicketGate


class AcceptedLink:
    """One generation of the link to one decode worker.

    Invariant: a granted order is answered the same again and posted once.
    """

    def __init__(
        self, live: LiveLink, *, choice: BackendChoice, decode_worker: WorkerRef, generation: int
    ) -> None:
        self.live = live
        self.choice = choice
        self.decode_worker = decode_worker
        self.generation = generation
        self._gate = TicketGate()
        self._last_reply: asyncio.Future[FetchReply] | None = None
        self._readings: set[asyncio.Future[MovedRange]] = set()

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
        self,
        order: FetchOrder,
        job: Callable[[Link], MovedRange],
        reply: "asyncio.Future[FetchReply]",
    ) -> "asyncio.Future[MovedRange]":
        """Use the ticket and post the operation; returns what it will have sent.

        The future is done when nothing reads the blocks any more, here or at the peer.
        """
        self._gate.grant(order)
        self._last_reply = reply
        posted = self.live.run(job)
        if not self.is_read_by_peer:
            return posted
        reading = asyncio.ensure_future(self._until_unread(posted))
        self._readings.add(reading)
        reading.add_done_callback(self._readings.discard)
        return reading

    @property
    def is_read_by_peer(self) -> bool:
        """Whether the peer reads the blocks themselves, instead of what is sent of them."""
        return self.live.spec.is_shared_memory

    async def last_reply(self) -> FetchReply:
        """Answer a repeated order as it was answered before."""
        assert self._last_reply is not None, "nothing was granted yet"
        return await asyncio.shield(self._last_reply)

    async def _until_unread(self, posted: "asyncio.Future[MovedRange]") -> MovedRange:
        try:
            return await posted
        except Exception:
            # not given back: only the end of the peer's process or mapping says as much
            await asyncio.shield(self.live.unread)
            raise


class LinkSource(Protocol):
    """Where a sender finds the link an order names; `LinkAcceptor` is one."""

    def link_for(
        self, decode_worker: WorkerRef, generation: int | None = None
    ) -> AcceptedLink | None:
        """Return the live link of exactly this process, and of this generation if one is named."""
