"""One hand-over as the decode side runs it: events of the outside into the machine, actions out.

    watch stream --+                  +--> reserve blocks
    reservation  --+--> machine --+---+--> fetch a range over the link
    ranges, link --+              |   +--> open the watch again
    deadlines    --+              +------> return, or raise

What an event leads to happens at once, in whoever tells of it: each task in between would cost a
turn of the event loop, which others share.

Invariant: an operation writes pool blocks only when it begins before `run` returns or raises; what
still writes by then is named to whoever takes the blocks back (`pool_writes.py`).
"""

import asyncio
import functools
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, cast

from kv_transfer.control import (
    Commit,
    ControlClosedError,
    FailureReason,
    TransferControl,
    TransferFailedError,
    TransferNotFoundError,
)
from kv_transfer.dialed_link import FetchOutcome, RangeRequest
from kv_transfer.moved_range import MovedRange
from kv_transfer.range_receiver import RangeReceiver, ReceptionSettings
from kv_transfer.receive_order import Received, ReceiveOrder, Reservation
from kv_transfer.receiver_state import (
    Action,
    Fail,
    Fetch,
    Finish,
    ReceiverLimits,
    ReceiverTransfer,
    Reserve,
    Watch,
)

Event = Callable[[float], list[Action]]

# Bounds one operation, so that requests take turns on a link and a deadline means something.
_MAX_BYTES_PER_FETCH = 32 << 20

# One sign of life may be lost, and one more.
_RENEWALS_PER_LEASE = 3


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
        # set once, by the action that ends it
        self._outcome: asyncio.Future[Commit] = asyncio.get_running_loop().create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._reservation: Reservation | None = None
        self._blocks = RangeReceiver(settings, order)
        self._ranges: list[MovedRange] = []
        self._committed_at: float | None = None

    async def run(self) -> Received:
        """Run to the end; TransferFailedError when the KV did not come."""
        ended = self._order.link.live.ended
        ended.add_done_callback(self._link_ended)
        self._open_watch()
        self._set_timer()
        has_arrived = False
        try:
            commit = await self._outcome
            has_arrived = True
            return self._received(commit)
        finally:
            self._machine.fail(FailureReason.CANCELLED)
            ended.remove_done_callback(self._link_ended)
            self._end_outcome()
            in_flight = self._blocks.close()
            # a commit that ended the request may come while its ranges are under way
            is_kept = has_arrived and not in_flight
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

    def _hear(self, event: Event) -> None:
        """Let the machine know what happened, and do what it says."""
        if self._outcome.done():
            return
        now = self._now()
        try:
            for action in event(now) + self._machine.tick(now):
                self._perform(action)
        except Exception as error:  # noqa: BLE001 - raised in `run`, whoever told of the event
            self._fail(error)
        self._set_timer()

    def _set_timer(self) -> None:
        deadline = self._machine.deadline
        if self._timer is not None and deadline == self._timer_due_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        loop, self._timer_due_at = asyncio.get_running_loop(), deadline
        delay_s = max(deadline - self._now(), 0.0)
        self._timer = loop.call_later(delay_s, self._time_is_over)

    def _time_is_over(self) -> None:
        self._timer = None
        self._hear(lambda _now: [])

    def _fail(self, error: BaseException) -> None:
        if not self._outcome.done():
            self._outcome.set_exception(error)

    def _end_outcome(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # also when `run` was cancelled just as it failed: the error counts as seen
        if not self._outcome.cancel() and not self._outcome.cancelled():
            self._outcome.exception()

    def _perform(self, action: Action) -> None:
        if isinstance(action, Finish):
            self._outcome.set_result(action.commit)
        elif isinstance(action, Fail):
            ended = self._order.link.live.ended
            detail = ended.result() if ended.done() else ""
            self._fail(TransferFailedError(action.reason, detail))
        elif isinstance(action, Fetch):
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
            self._fail(error)

    def _link_ended(self, _ended: "asyncio.Future[str]") -> None:
        self._put_failure(self._order.link.live.failure)

    def _put_failure(self, reason: FailureReason) -> None:
        self._hear(lambda _now: self._machine.fail(reason))

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
                    self._hear(functools.partial(machine.hear, message))
        except ControlClosedError:
            pass
        except TransferNotFoundError:
            self._hear(lambda _now: machine.not_found())
            return
        self._hear(machine.watch_broken)

    async def _take_blocks(self) -> None:
        self._reservation = await self._reserve()
        self._blocks.block_ids = self._reservation.block_ids
        num_cached = min(self._reservation.num_cached_tokens, self._order.num_tokens)
        self._hear(functools.partial(self._machine.reserved, num_cached))

    def _fetch(self, fetch: Fetch) -> None:
        order, machine, config = self._order, self._machine, self._settings.config
        with_digest = random.random() < config.digest_sample
        expected = self._blocks.expect(fetch.token_start, fetch.token_end)
        request = RangeRequest(
            transfer_id=order.transfer_id,
            epoch=order.epoch,
            token_start=fetch.token_start,
            token_end=fetch.token_end,
            with_digest=with_digest,
            num_bytes=(fetch.token_end - fetch.token_start) * self._settings.layout.bytes_per_token,
            receive=functools.partial(self._blocks.receive, expected),
            is_wanted=lambda: not machine.is_over,
        )
        # at once, not when a task of ours gets its first turn
        asking = order.link.fetch(request, self._control)
        # behind the call, which takes longer
        asyncio.get_running_loop().call_soon(self._blocks.prepare, expected)
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
            self._hear(lambda now: machine.fetch_replied(fetch, verdict, now))
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
        digest = b""
        if with_digest:
            digest = await self._blocks.digest(fetch.token_start, fetch.token_end)
        if digest != outcome.reply.digest:
            self._put_failure(FailureReason.DIGEST_MISMATCH)
        else:
            self._hear(lambda now: machine.arrived(fetch, digest, now))

    def _received(self, commit: Commit) -> Received:
        assert self._committed_at is not None
        reservation = self._reservation
        return Received(
            commit=commit,
            num_bytes=sum(each.num_bytes for each in self._ranges),
            transfer_s=self._blocks.transfer_s,
            tail_s=self._now() - self._committed_at,
            num_cached_tokens=reservation.num_cached_tokens if reservation else 0,
            ranges=tuple(self._ranges),
        )
