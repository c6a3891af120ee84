"""A ready link as its decode worker uses it: issues tickets, posts receives, keeps the numbers."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kv_transfer.backend import LinkBrokenError
from kv_transfer.control import (
    FailureReason,
    FetchOrder,
    FetchReply,
    FetchVerdict,
    PeerInfo,
    TransferControl,
    WorkerRef,
)
from kv_transfer.link import Link
from kv_transfer.live_link import LiveLink
from kv_transfer.tickets import TicketIssuer

_RETRY_S = 0.05
# attempts that fit into the deadline of one fetch, when none of them is answered
_NUM_ATTEMPTS = 3
_LEARNING_RATE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRequest:
    """One range a transfer wants, and how it is received once granted."""

    transfer_id: int
    epoch: int
    token_start: int
    token_end: int
    with_digest: bool
    num_bytes: int
    # runs on the link's thread after the grant, wanted or not: the peer sends in any case; it is
    # told which of the peer's blocks are lent
    receive: Callable[[Link, Sequence[int]], int]
    # asked once it is this request's turn; an unwanted one is not sent at all
    is_wanted: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class FetchOutcome:
    """The peer's verdict; when granted, `arrival` gives the bytes received."""

    reply: FetchReply
    arrival: "asyncio.Future[int] | None"


class DialedLink:
    """One generation of the link to one prefill worker.

    Invariant: one order is open at a time, and what was granted is posted in that order.
    """

    def __init__(
        self,
        live: LiveLink,
        *,
        worker: WorkerRef,
        peer: PeerInfo,
        generation: int,
        latency_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.live = live
        self.peer = peer
        self.generation = generation
        self.latency_s = latency_s
        # bytes asked for and not here yet
        self.queued_bytes = 0
        # what came over it, since it was made
        self.moved_bytes = 0
        self._worker = worker
        self._now = now
        self._issuer = TicketIssuer()
        self._turn = asyncio.Lock()
        self._became_idle = asyncio.Event()
        self._orders: set[asyncio.Task[FetchOutcome]] = set()

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Probed when the link was made, then learnt from transfers."""
        return self.live.bandwidth_bytes_per_s

    @property
    def is_usable(self) -> bool:
        """Whether the link lives."""
        return not self.live.ended.done()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is asked for or on its way."""
        return not self.queued_bytes

    async def wait_idle(self) -> None:
        """Wait until nothing is under way, or the link has ended."""
        while self.is_usable and not self.is_idle:
            self._became_idle.clear()
            idle = asyncio.ensure_future(self._became_idle.wait())
            either: set[asyncio.Future[Any]] = {idle, self.live.ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            idle.cancel()

    def fetch(
        self, request: RangeRequest, control: TransferControl
    ) -> "asyncio.Task[FetchOutcome]":
        """Ask for one range in turn and post its receive when granted; await it shielded.

        Nobody may stop an order that was sent. LinkBrokenError when the link ended, or ends because
        the order's outcome stays unknown.
        """
        self.queued_bytes += request.num_bytes
        task = asyncio.get_running_loop().create_task(self._fetch_in_turn(request, control))
        self._orders.add(task)
        task.add_done_callback(lambda done: self._order_ended(done, request.num_bytes))
        return task

    async def _fetch_in_turn(self, request: RangeRequest, control: TransferControl) -> FetchOutcome:
        async with self._turn:
            if not self.is_usable:
                raise LinkBrokenError(self.live.ended.result())
            if not request.is_wanted():
                return FetchOutcome(FetchReply(FetchVerdict.GONE), None)
            order = self._issuer.issue(
                FetchOrder(
                    transfer_id=request.transfer_id,
                    epoch=request.epoch,
                    decode_worker=self._worker,
                    generation=self.generation,
                    ticket=0,
                    token_start=request.token_start,
                    token_end=request.token_end,
                    with_digest=request.with_digest,
                )
            )
            reply = await self._ask(order, control)
            self._issuer.settle(reply.verdict)
            if reply.verdict is not FetchVerdict.GRANTED:
                return FetchOutcome(reply, None)
            return FetchOutcome(reply, self._post(request, reply.lent))

    def _post(self, request: RangeRequest, lent: Sequence[int]) -> "asyncio.Future[int]":
        spec, arrival = self.live.spec, self.live.run(self._timed(request, lent))
        if spec.is_shared_memory:
            # behind it: whoever waits for the bytes does not wait for what wakes the peer
            self.live.run(lambda link: link.shared_memory.give_back(spec.timeout_s))
        return arrival

    def _timed(self, request: RangeRequest, lent: Sequence[int]) -> Callable[[Link], int]:
        def receive(link: Link) -> int:
            started = time.monotonic()
            num_bytes = request.receive(link, lent)
            self.moved_bytes += num_bytes
            self.live.learn_bandwidth(num_bytes, time.monotonic() - started)
            return num_bytes

        return receive

    async def _ask(self, order: FetchOrder, control: TransferControl) -> FetchReply:
        timeout_s = self.live.spec.timeout_s
        deadline = self._now() + timeout_s
        detail = ""
        while self.is_usable and (left_s := deadline - self._now()) > 0:
            started = self._now()
            try:
                reply = await self._attempt(order, control, min(left_s, timeout_s / _NUM_ATTEMPTS))
            except TimeoutError:
                detail = "no answer"
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                detail = "the call was cancelled"  # as gRPC does when its channel is closed
            except Exception as error:  # noqa: BLE001 - whatever it was, the outcome is unknown
                detail = str(error)
            else:
                self.latency_s += _LEARNING_RATE * (self._now() - started - self.latency_s)
                return reply
            await asyncio.sleep(random.uniform(0.5, 1.5) * _RETRY_S)
        # the peer may have posted its half: only a new generation is in order again
        self.live.fail(f"fetch unanswered: {detail}", FailureReason.TIMEOUT)
        raise LinkBrokenError(self.live.ended.result())

    async def _attempt(
        self, order: FetchOrder, control: TransferControl, timeout_s: float
    ) -> FetchReply:
        """Ask once, in this very task: each task in between costs a turn of the loop."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s) as limit:

            def link_ended(_ended: "asyncio.Future[str]") -> None:
                if not limit.expired():
                    limit.reschedule(loop.time())

            self.live.ended.add_done_callback(link_ended)
            try:
                return await control.fetch(order)
            finally:
                self.live.ended.remove_done_callback(link_ended)

    def _order_ended(self, task: "asyncio.Task[FetchOutcome]", num_bytes: int) -> None:
        self._orders.discard(task)
        arrival = None if task.cancelled() or task.exception() else task.result().arrival
        if arrival is None:
            self._bytes_arrived(num_bytes)
        else:
            arrival.add_done_callback(lambda _: self._bytes_arrived(num_bytes))

    def _bytes_arrived(self, num_bytes: int) -> None:
        self.queued_bytes -= num_bytes
        if self.is_idle:
            self._became_idle.set()
