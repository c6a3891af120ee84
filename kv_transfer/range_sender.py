"""Carries out what was granted: the reply with its digest, the operation on the link's thread.

A peer that reads the pool itself is told where in the reply, and the operation is to wait until it
has read.
"""

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from faults.plan import is_armed
from kv_transfer.accepted_link import AcceptedLink
from kv_transfer.config import KVTransferConfig
from kv_transfer.control import (
    ChunkDigest,
    FetchOrder,
    FetchReply,
    FetchVerdict,
    StaleLinkError,
)
from kv_transfer.digest import range_digest
from kv_transfer.faulty_range import ask_fault_plan
from kv_transfer.held_transfer import HeldTransfer
from kv_transfer.layout import KVLayout
from kv_transfer.link import Link
from kv_transfer.moved_range import MovedRange
from kv_transfer.pool_blocks import PoolBlocks
from kv_transfer.range_mover import RangeOrder


@dataclass(frozen=True, slots=True)
class GrantedSend:
    """One granted operation under way."""

    reply: "asyncio.Future[FetchReply]"
    # done when nothing reads the blocks any more, here or at the peer
    sent: "asyncio.Future[MovedRange]"


class RangeSender:
    """Reads one pool for all links of a prefill worker."""

    def __init__(
        self,
        pool: torch.Tensor,
        *,
        layout: KVLayout,
        config: KVTransferConfig,
        now: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._blocks = PoolBlocks(pool, layout)
        self._layout = layout
        self._config = config
        self._now = now
        self._replies: set[asyncio.Task[FetchReply]] = set()

    def grant(
        self, held: HeldTransfer, link: AcceptedLink, order: FetchOrder, *, lent: Sequence[int]
    ) -> GrantedSend:
        """Use the order's ticket: reply, and send in its turn, whatever becomes of the caller.

        `lent` are the blocks of the range when the peer reads those itself.
        """
        block_ids = list(held.block_ids)
        granted = FetchReply(FetchVerdict.GRANTED, lent=tuple(lent))
        reply = self._reply(held, link, order, block_ids, granted)
        label = held.machine.order.request_label
        start, end = order.token_start, order.token_end
        ranged = held.prepared_for(link, start, end) or self._range(block_ids, start, end)
        send = functools.partial(self._send, link, ranged, label, self._now())
        return GrantedSend(reply, link.grant(order, send, reply))

    def prepare(self, held: HeldTransfer, link: AcceptedLink) -> None:
        """Do ahead what can be done of the last range of a prompt, which is computed."""
        start, end = held.machine.granted_end, held.machine.num_offered
        if start < end and held.is_computed():
            order = self._range(held.block_ids, start, end)
            link.live.ranges(self._blocks).prepare_send(order)
            held.prepared = link, order

    async def close(self) -> None:
        """Wait for the replies under way."""
        await asyncio.gather(*self._replies, return_exceptions=True)

    def _range(self, block_ids: Sequence[int], token_start: int, token_end: int) -> RangeOrder:
        return RangeOrder(
            block_ids=block_ids,
            token_start=token_start,
            token_end=token_end,
            timeout_s=self._config.transfer_timeout_s,
        )

    def _reply(
        self,
        held: HeldTransfer,
        link: AcceptedLink,
        order: FetchOrder,
        block_ids: Sequence[int],
        reply: FetchReply,
    ) -> "asyncio.Future[FetchReply]":
        loop = asyncio.get_running_loop()
        # queued ahead of the operation itself
        asked = self._ask_fault_plan(held, link) if reply.lent and is_armed() else None
        if asked is None and not order.with_digest:
            known: asyncio.Future[FetchReply] = loop.create_future()
            known.set_result(reply)
            return known
        later = loop.create_task(self._reply_later(held, order, block_ids, reply, asked))
        self._replies.add(later)
        later.add_done_callback(self._replies.discard)
        return later

    async def _reply_later(
        self,
        held: HeldTransfer,
        order: FetchOrder,
        block_ids: Sequence[int],
        reply: FetchReply,
        asked: "asyncio.Future[bool] | None",
    ) -> FetchReply:
        if asked is not None and await self._is_spoilt(asked):
            # No bytes of ours travel that could be spoilt: the peer is sent to the wrong blocks.
            wrong = tuple((block_id + 1) % len(self._pool) for block_id in reply.lent)
            reply = replace(reply, lent=wrong)
        if order.with_digest:
            start, end = order.token_start, order.token_end
            digest = await asyncio.to_thread(range_digest, self._pool, block_ids, start, end)
            held.digests.append(ChunkDigest(token_start=start, token_end=end, digest=digest))
            reply = replace(reply, digest=digest)
        return reply

    def _ask_fault_plan(self, held: HeldTransfer, link: AcceptedLink) -> "asyncio.Future[bool]":
        """Let the plan act before the peer is told where to read; whether it says `corrupt`."""
        label = held.machine.order.request_label
        return link.live.run(
            lambda live: ask_fault_plan("kv_send", live, request_label=label) is not None
        )

    async def _is_spoilt(self, asked: "asyncio.Future[bool]") -> bool:
        try:
            return await asked
        except Exception as error:
            # whatever a job raises has ended the link
            raise StaleLinkError(str(error)) from error

    def _send(
        self,
        accepted: AcceptedLink,
        order: RangeOrder,
        request_label: str,
        granted_at: float,
        link: Link,
    ) -> MovedRange:
        # on the link's thread
        started_at = self._now()
        spoil = None
        if not accepted.is_read_by_peer:
            spoil = ask_fault_plan("kv_send", link, request_label=request_label)
        num_bytes = accepted.live.ranges(self._blocks).send_range(link, order, alter=spoil)
        return MovedRange(
            token_start=order.token_start,
            token_end=order.token_end,
            backend=link.spec.backend,
            num_bytes=num_bytes,
            num_blocks=self._layout.blocks_of(order.token_start, order.token_end),
            ticket_wait_s=started_at - granted_at,
            started_at=started_at,
            ended_at=self._now(),
        )
