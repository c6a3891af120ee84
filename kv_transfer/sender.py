"""The prefill side of hand-overs: holds blocks, offers what is computed, sends what is fetched.

    open --> offer ... --> commit             by the worker, as the engine computes
               |              |
    watch <----+--------------+               a stream; opening it renews the lease
    fetch --> verdict, send on the link       each GRANTED is posted once, in ticket order
    release | cancel | lease or hold over --> blocks back, after the last granted send

Its life cycle is `sender_state.SenderTransfer`; here are the table, the timers and the links.
"""

import asyncio
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

import torch

from kv_transfer.accepted_link import AcceptedLink, LinkSource
from kv_transfer.config import KVTransferConfig
from kv_transfer.control import (
    Commit,
    FetchOrder,
    FetchReply,
    FetchVerdict,
    Offer,
    StaleLinkError,
    TransferMessage,
    TransferNotFoundError,
    WorkerRef,
)
from kv_transfer.counters import SenderCounters
from kv_transfer.held_transfer import HeldTransfer, TransferTable
from kv_transfer.layout import KVLayout, block_range
from kv_transfer.moved_range import MovedRange
from kv_transfer.range_sender import RangeSender
from kv_transfer.sender_state import EndCause, SenderOrder, SenderState, SenderTransfer
from kv_transfer.tickets import TicketCheck

logger = logging.getLogger(__name__)


class KVSender:
    """Owns the hand-overs of one prefill worker; all methods are for the event loop.

    Invariant: each opened transfer calls its `on_release` exactly once, when nothing of ours reads
    its blocks any more. What a peer may still read itself is named there, and each of these blocks
    comes to `end_quarantine` as often as it was named.
    """

    def __init__(
        self,
        kv_cache_tensor: torch.Tensor,
        *,
        layout: KVLayout,
        config: KVTransferConfig,
        acceptor: LinkSource,
        end_quarantine: Callable[[Sequence[int]], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = kv_cache_tensor
        self._layout = layout
        self._config = config
        self._acceptor = acceptor
        self._end_quarantine = end_quarantine
        self._now = now
        self._table = TransferTable(remember_s=config.transfer_timeout_s, now=now)
        self._ranges = RangeSender(kv_cache_tensor, layout=layout, config=config, now=now)
        self.counters = SenderCounters()

    @property
    def num_open(self) -> int:
        """Transfers whose blocks are held now."""
        return len(self._table)

    def open(
        self,
        order: SenderOrder,
        on_release: Callable[[Sequence[int]], None],
        on_sent: Callable[[MovedRange], None] = lambda _: None,
    ) -> None:
        """Promise a request's KV to a decode worker.

        `on_release` may come while the prompt is still being computed: then nobody wants it. It is
        given the blocks that must not be reused before `end_quarantine`. `on_sent` comes once for
        each range, as a rule before it.
        """
        if self._table.get(order.transfer_id) is not None:
            raise ValueError(f"Got {order.transfer_id = } but expected one that is not open")
        machine = SenderTransfer(order, lease_s=self._config.lease_s, now=self._now())
        held = HeldTransfer(machine, on_release, on_sent)
        was_cancelled = self._table.has_ended(order.transfer_id)
        self._table.add(order.transfer_id, held)
        if was_cancelled:
            machine.end(EndCause.CANCELLED)
        self._settle(held)

    def offer(self, transfer_id: int, num_tokens: int, block_ids: Sequence[int]) -> None:
        """Say that tokens [0, num_tokens) are computed, and where; late news is ignored.

        With 0 it says that the prompt has begun: time for the decode worker to take blocks.
        """
        held = self._table.get(transfer_id)
        if held is None:
            return
        assert len(block_ids) >= self._layout.num_blocks(num_tokens), "blocks are missing"
        if held.machine.offer(num_tokens):
            held.block_ids = list(block_ids)
            held.mark_computed(self._pool)
            held.tell()

    def commit(self, transfer_id: int, commit: Commit) -> None:
        """Say that the whole prompt is computed and offered, with its first tokens."""
        held = self._table.get(transfer_id)
        if held is None:
            return
        assert held.machine.num_offered == commit.num_tokens or not held.machine.is_open, (
            "offer all tokens before the commit"
        )
        if held.machine.finish_prefill(commit, self._now()):
            held.tell()
            self._settle(held)
            # once the peer has been told: it needs a moment to ask
            asyncio.get_running_loop().call_soon(self._prepare, held)

    async def watch(
        self, transfer_id: int, *, epoch: int, decode_worker: WorkerRef
    ) -> AsyncGenerator[TransferMessage, None]:
        """Yield offers, then the commit, then stay open until the transfer ends.

        TransferNotFoundError when the id does not appear in time, or ended, or belongs to another
        attempt. Opening it renews the lease: a decode worker that lives does so again and again.
        """
        held = await self._table.find(transfer_id, timeout_s=self._config.transfer_timeout_s)
        if held is None:
            raise TransferNotFoundError(f"no transfer {transfer_id}")
        if not held.machine.is_addressed_by(epoch, decode_worker):
            self.counters.fenced_messages += 1
            raise TransferNotFoundError(f"transfer {transfer_id} belongs to another attempt")
        news = held.subscribe()
        held.machine.renew(self._now())
        self._settle(held)
        try:
            async for message in self._follow(held, news):
                yield message
        finally:
            held.unsubscribe(news)
            held.machine.renew(self._now())
            self._settle(held)

    async def fetch(self, order: FetchOrder) -> FetchReply:
        """Decide about one range; once granted it is sent, whatever becomes of the caller.

        StaleLinkError when the link the order names is not the one that lives here.
        """
        link = self._acceptor.link_for(order.decode_worker, order.generation)
        check = link.check(order) if link is not None else TicketCheck.CONFLICT
        if link is None or check is TicketCheck.CONFLICT:
            self.counters.fenced_messages += 1
            raise StaleLinkError(f"no link of generation {order.generation} in this order")
        if check is TicketCheck.STALE:
            self.counters.fenced_messages += 1
            return FetchReply(FetchVerdict.GONE)
        if check is TicketCheck.REPEAT:
            return await link.last_reply()
        held = self._table.get(order.transfer_id)
        verdict = self._decide(held, order)
        if held is None or verdict is not FetchVerdict.GRANTED:
            return FetchReply(verdict)
        reply = self._grant(held, link, order)
        return reply.result() if reply.done() else await asyncio.shield(reply)

    def release(self, transfer_id: int, *, epoch: int) -> None:
        """Take the decode worker's word that it needs nothing more; idempotent."""
        held = self._table.get(transfer_id)
        if held is None:
            self._table.remember(transfer_id)
        elif held.machine.order.epoch != epoch:
            self.counters.fenced_messages += 1
        else:
            held.machine.end(EndCause.RELEASED)
            self._settle(held)

    def cancel(self, transfer_id: int) -> None:
        """Take the router's word that nobody wants the request any more; idempotent."""
        held = self._table.get(transfer_id)
        if held is None:
            self._table.remember(transfer_id)
        else:
            held.machine.end(EndCause.CANCELLED)
            self._settle(held)

    def expire(self) -> None:
        """End every transfer whose time is over; the timers call this by themselves."""
        for held in self._table:
            held.machine.tick(self._now())
            self._settle(held)

    async def close(self) -> None:
        """Cancel all transfers and wait for the sends under way; close the links first."""
        for held in self._table:
            held.machine.end(EndCause.CANCELLED)
            self._settle(held)
        await self._ranges.close()

    async def _follow(
        self, held: HeldTransfer, news: asyncio.Event
    ) -> AsyncGenerator[TransferMessage, None]:
        num_told, machine = -1, held.machine
        is_committed = False
        while machine.is_open:
            news.clear()
            if machine.commit is not None and not is_committed:
                is_committed = True
                yield replace(machine.commit, digests=tuple(held.digests))
            elif machine.commit is None and machine.has_begun and machine.num_offered > num_told:
                num_told = machine.num_offered
                yield Offer(num_told)
            else:
                await news.wait()
        if not is_committed:
            raise TransferNotFoundError(f"transfer {machine.order.transfer_id} was cancelled")

    def _decide(self, held: HeldTransfer | None, order: FetchOrder) -> FetchVerdict:
        if held is None:
            return FetchVerdict.GONE
        if not held.machine.is_addressed_by(order.epoch, order.decode_worker):
            self.counters.fenced_messages += 1
        else:
            held.machine.renew(self._now())
            self._settle(held)
        if not held.is_computed():
            return FetchVerdict.NOT_YET
        return held.machine.fetch(order)

    def _prepare(self, held: HeldTransfer) -> None:
        link = self._acceptor.link_for(held.machine.order.decode_worker)
        if link is not None and held.machine.is_open:
            self._ranges.prepare(held, link)

    def _grant(
        self, held: HeldTransfer, link: AcceptedLink, order: FetchOrder
    ) -> "asyncio.Future[FetchReply]":
        lent: list[int] = []
        if link.is_read_by_peer:
            first, end = block_range(order.token_start, order.token_end, self._layout.block_size)
            lent = held.block_ids[first:end]
            held.lent.append(lent)
        granted = self._ranges.grant(held, link, order, lent=lent)
        granted.sent.add_done_callback(functools.partial(self._operation_ended, held, lent))
        return granted.reply

    def _operation_ended(
        self, held: HeldTransfer, lent: list[int], sent: "asyncio.Future[MovedRange]"
    ) -> None:
        if not sent.cancelled() and sent.exception() is None:
            held.on_sent(sent.result())
        held.machine.operation_ended()
        if lent:
            held.lent.remove(lent)
            if held.is_given_back:
                self._end_quarantine(lent)
        self._settle(held)

    def _settle(self, held: HeldTransfer) -> None:
        """Carry out what the machine has come to: blocks back, or the next timer."""
        machine = held.machine
        transfer_id = machine.order.transfer_id
        if machine.state is SenderState.DRAINING and machine.num_granted == len(held.lent):
            machine.quarantine()
        if machine.state is SenderState.CLOSED:
            if self._table.get(transfer_id) is held:
                self._table.remove(transfer_id)
                if machine.cause is EndCause.EXPIRED:
                    self.counters.leases_expired += 1
                    logger.warning("transfer %d: lease expired", transfer_id)
                held.give_back()
            return
        if not machine.is_open:
            held.tell()
        if held.timer is not None:
            held.timer.cancel()
        delay_s = max(machine.deadline - self._now(), 0.0)
        loop = asyncio.get_running_loop()
        held.timer = loop.call_later(delay_s, self._expire_one, held) if machine.is_open else None

    def _expire_one(self, held: HeldTransfer) -> None:
        held.machine.tick(self._now())
        self._settle(held)
