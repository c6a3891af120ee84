"""One hand-over as the decode side runs it: events of the outside into the machine, actions out.

    watch stream --+                            +--> reserve blocks
    reservation  --+--> inbox --> machine --+---+--> fetch a range over the link
    ranges, link --+      ^                 |   +--> open the watch again
    deadlines    ---------+                 +------> return, or raise

Invariant: an operation writes pool blocks only when it begins before `run` returns or raises; what
still writes by then is named to whoever takes the blocks back (`pool_writes.py`).
"""

import asyncio
import functools
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

import torch

from kv_transfer.config import KVTransferConfig
from kv_transfer.control import (
    Commit,
    ControlClosedError,
    FailureReason,
    TransferControl,
    TransferFailedError,
    TransferNotFoundError,
    WorkerRef,
)
from kv_transfer.dialed_link import FetchOutcome, RangeRequest
from kv_transfer.digest import range_digest
from kv_transfer.faulty_range import ask_fault_plan
from kv_transfer.layout import KVLayout, block_range
from kv_transfer.link import Link
from kv_transfer.moved_range import MovedRange
from kv_transfer.pool_writes import PoolWrites
from kv_transfer.range_mover import RangeOrder
from kv_transfer.receive_order import Received, ReceiveOrder, Reservation
from kv_transfer.receiver_state import (
    Action,
    Fail,
    Fetch,
    Finish,
    ReceiverLimits,
    ReceiverState,
    ReceiverTransfer,
    Reserve,
    Watch,
)

Event = Callable[[float], list[Action]]

# Bounds one operation, so that requests take turns on a link and a deadline means something.
_MAX_BYTES_PER_FETCH = 32 << 20

# One sign of life may be lost, and one more.
_RENEWALS_PER_LEASE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceptionSettings:
    """What all receptions of one decode worker share."""

    pool: torch.Tensor
    layout: KVLayout
    worker: WorkerRef
    config: KVTransferConfig
    end_quarantine: Callable[[Sequence[int]], None]
    now: Callable[[], float] = time.monotonic


class Reception:
    """One run of `ReceiverTransfer`."""

    def __init__(
        self,
        settings: ReceptionSettings,
        order: ReceiveOrder,
        control: TransferControl,
        reserve: Callable[[], Awaitable[Reservation]],
        give_back: Callable[[Sequence[int]], None],
    ) -> None:
        self._settings = settings
        self._order = order
        self._control = control
        self._reserve = reserve
        self._give_back = give_back
        self._now = settings.now
        layout, config = settings.layout, settings.config
        blocks_per_fetch = max(1, _MAX_BYTES_PER_FETCH // layout.bytes_per_block)
        self._machine = ReceiverTransfer(
            ReceiverLimits(
                num_tokens=order.num_tokens,
                block_size=layout.block_size,
                max_tokens_per_fetch=blocks_per_fetch * layout.block_size,
                deadline=self._now() + order.timeout_s,
                control_timeout_s=config.transfer_timeout_s,
                renew_s=config.lease_s / _RENEWALS_PER_LEASE,
            )
        )
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._reservation: Reservation | None = None
        self._writes = PoolWrites(settings.end_quarantine)
        self._ranges: list[MovedRange] = []
        self._transfer_s = 0.0
        self._committed_at: float | None = None

    async def run(self) -> Received:
        """Run to the end; TransferFailedError when the KV did not come."""
        ended = self._order.link.live.ended
        ended.add_done_callback(self._link_ended)
        self._open_watch()
        try:
            while True:
                for action in await self._next_actions():
                    if isinstance(action, Finish):
                        return self._received(action.commit)
                    self._perform(action)
        finally:
            self._machine.fail(FailureReason.CANCELLED)
            ended.remove_done_callback(self._link_ended)
            in_flight = self._writes.close()
            # a commit that ended the request may come while its ranges are under way
            is_kept = self._machine.state is ReceiverState.DONE and not in_flight
            if self._reservation is not None and not is_kept:
                self._give_back(in_flight)
            for task in self._tasks:
                task.cancel()
            try:
                await asyncio.gather(*self._tasks, return_exceptions=True)
            except asyncio.CancelledError:
                # at the very end: the caller hears of that, and not that all had arrived
                if self._reservation is not None and is_kept:
                    self._give_back(())
                raise

    async def _next_actions(self) -> list[Action]:
        try:
            async with asyncio.timeout(max(self._machine.deadline - self._now(), 0.0)):
                event = await self._inbox.get()
        except TimeoutError:
            return self._machine.tick(self._now())
        return event(self._now()) + self._machine.tick(self._now())

    def _perform(self, action: Action) -> None:
        if isinstance(action, Fail):
            ended = self._order.link.live.ended
            detail = ended.result() if ended.done() else ""
            raise TransferFailedError(action.reason, detail)
        if isinstance(action, Fetch):
            self._fetch(action)
        elif isinstance(action, Watch):
            self._open_watch()
        elif isinstance(action, Reserve):
            self._start(self._take_blocks())

    def _open_watch(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self._watching = self._start(self._watch())

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # not one of the failures a hand-over knows: it is raised where it was asked for
            self._inbox.put_nowait(functools.partial(_raise, error))

    def _link_ended(self, _ended: "asyncio.Future[str]") -> None:
        self._put_failure(self._order.link.live.failure)

    def _put_failure(self, reason: FailureReason) -> None:
        self._inbox.put_nowait(lambda _now: self._machine.fail(reason))

    async def _watch(self) -> None:
        order, machine = self._order, self._machine
        stream = self._control.watch(
            order.transfer_id, epoch=order.epoch, decode_worker=self._settings.worker
        )
        try:
            async with aclosing(cast(Any, stream)):
                async for message in stream:
                    if isinstance(message, Commit) and self._committed_at is None:
                        self._committed_at = self._now()
                    self._inbox.put_nowait(functools.partial(machine.hear, message))
        except ControlClosedError:
            pass
        except TransferNotFoundError:
            self._inbox.put_nowait(lambda _now: machine.not_found())
            return
        self._inbox.put_nowait(machine.watch_broken)

    async def _take_blocks(self) -> None:
        self._reservation = await self._reserve()
        num_cached = min(self._reservation.num_cached_tokens, self._order.num_tokens)
        self._inbox.put_nowait(functools.partial(self._machine.reserved, num_cached))

    def _fetch(self, fetch: Fetch) -> None:
        order, machine, config = self._order, self._machine, self._settings.config
        with_digest = random.random() < config.digest_sample
        request = RangeRequest(
            transfer_id=order.transfer_id,
            epoch=order.epoch,
            token_start=fetch.token_start,
            token_end=fetch.token_end,
            with_digest=with_digest,
            num_bytes=(fetch.token_end - fetch.token_start) * self._settings.layout.bytes_per_token,
            receive=functools.partial(self._receive, fetch),
            is_wanted=lambda: not machine.is_over,
        )
        # at once, not when a task of ours gets its first turn
        asking = order.link.fetch(request, self._control)
        self._start(self._follow(fetch, asking, asked_at=self._now(), with_digest=with_digest))

    async def _follow(
        self,
        fetch: Fetch,
        asking: "asyncio.Task[FetchOutcome]",
        *,
        asked_at: float,
        with_digest: bool,
    ) -> None:
        """Tell the machine what becomes of a range that was asked for."""
        order, machine = self._order, self._machine
        try:
            outcome = await asyncio.shield(asking)
            granted_at = self._now()
            verdict = outcome.reply.verdict
            self._inbox.put_nowait(lambda now: machine.fetch_replied(fetch, verdict, now))
            if outcome.arrival is None:
                return
            # the operation runs on, wanted or not
            num_bytes = await asyncio.shield(outcome.arrival)
        except Exception as error:  # noqa: BLE001
            # whatever an operation raises ends its link, which may not know of it yet
            order.link.live.fail(str(error) or type(error).__name__)
            self._put_failure(order.link.live.failure)
            return
        self._ranges.append(
            MovedRange(
                token_start=fetch.token_start,
                token_end=fetch.token_end,
                backend=order.link.live.spec.backend,
                num_bytes=num_bytes,
                num_blocks=self._settings.layout.blocks_of(fetch.token_start, fetch.token_end),
                ticket_wait_s=granted_at - asked_at,
                started_at=granted_at,
                ended_at=self._now(),
            )
        )
        digest = await self._digest(fetch) if with_digest else b""
        if digest != outcome.reply.digest:
            self._put_failure(FailureReason.DIGEST_MISMATCH)
        else:
            self._inbox.put_nowait(lambda now: machine.arrived(fetch, digest, now))

    async def _digest(self, fetch: Fetch) -> bytes:
        assert self._reservation is not None
        return await asyncio.to_thread(
            range_digest,
            self._settings.pool,
            self._reservation.block_ids,
            fetch.token_start,
            fetch.token_end,
        )

    def _receive(self, fetch: Fetch, link: Link) -> int:
        # on the link's thread
        assert self._reservation is not None
        settings, block_ids = self._settings, self._reservation.block_ids
        started = time.monotonic()
        spoil = ask_fault_plan("kv_recv", link, request_label=self._order.request_label)
        first, end = block_range(fetch.token_start, fetch.token_end, settings.layout.block_size)
        with self._writes.of(block_ids[first:end]) as is_wanted:
            num_bytes = self._order.link.live.ranges(settings.pool).receive_range(
                link,
                RangeOrder(
                    block_ids=block_ids,
                    token_start=fetch.token_start,
                    token_end=fetch.token_end,
                    timeout_s=settings.config.transfer_timeout_s,
                ),
                alter=spoil,
                is_wanted=is_wanted,
            )
        self._transfer_s += time.monotonic() - started
        return num_bytes

    def _received(self, commit: Commit) -> Received:
        assert self._committed_at is not None
        reservation = self._reservation
        return Received(
            commit=commit,
            num_bytes=sum(each.num_bytes for each in self._ranges),
            transfer_s=self._transfer_s,
            tail_s=self._now() - self._committed_at,
            num_cached_tokens=reservation.num_cached_tokens if reservation else 0,
            ranges=tuple(self._ranges),
        )


def _raise(error: BaseException, _now: float) -> list[Action]:
    raise error
