"""One generation of one link as it runs: process group, thread, buffers, control stream.

    control.receive --> store.deliver, peer_ready        store.set, alive --> control.send
    any failure, the end of the control stream, or silence on it
                                                --> `ended` (with the reason) --> abort

It ends as a whole and is never used again; whoever made it makes the next generation.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from kv_transfer.backend import LinkBrokenError, LinkTimeoutError
from kv_transfer.control import (
    ControlClosedError,
    FailureReason,
    LinkAlive,
    LinkControl,
    LinkMessage,
    LinkReady,
    StoreEntry,
)
from kv_transfer.layout import KVLayout
from kv_transfer.link import Link, LinkSpec
from kv_transfer.link_thread import LinkThread, run_in_thread
from kv_transfer.mapped_ranges import MappedRanges
from kv_transfer.message_ranges import MessageRanges
from kv_transfer.pool_blocks import PoolBlocks
from kv_transfer.range_mover import RangeMover
from kv_transfer.store import RendezvousStore

logger = logging.getLogger(__name__)

T = TypeVar("T")

LinkFactory = Callable[[LinkSpec, RendezvousStore], Link]

# weight of the newest transfer in the learnt bandwidth
_LEARNING_RATE = 0.2
# of one `timeout_s`; so many without a message end the link
_NUM_PERIODS = 4


class LiveLink:
    """Owns everything one generation of a link needs.

    All methods but those that say so are for the event loop.

    Invariant: once `ended` is set no new operation starts, and every running one raises.
    """

    def __init__(
        self,
        spec: LinkSpec,
        control: LinkControl,
        *,
        peer_layout: KVLayout,
        make_link: LinkFactory = Link,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.spec = spec
        self._peer_layout = peer_layout
        self.bandwidth_bytes_per_s = 0.0
        self.ended: asyncio.Future[str] = self._loop.create_future()
        # set some time after the end: from then on the peer reads nothing of our pool any more
        self.unread: asyncio.Future[None] = self._loop.create_future()
        self.peer_ready = asyncio.Event()
        self._control = control
        self._outbox: asyncio.Queue[LinkMessage] = asyncio.Queue()
        # periods since the last message of the peer
        self._num_missed = 0
        self._is_heard = asyncio.Event()
        self._store = RendezvousStore(self._post_entry, timeout_s=spec.timeout_s)
        self._link = make_link(spec, self._store)
        self._thread = LinkThread(f"kv-{spec.link_id}")
        self._mover: RangeMover | None = None
        self.is_built = False
        # what the transfers under way report once it has ended
        self.failure = FailureReason.LINK_BROKEN
        self._tasks: set[asyncio.Task[None]] = set()
        self._aborting: asyncio.Future[None] | None = None
        self._close_task: asyncio.Task[None] | None = None
        self._unread_task: asyncio.Task[None] | None = None

    async def build(self) -> None:
        """Connect and probe; LinkBrokenError when that fails, and then the link has ended."""
        self._start(self._pump_in())
        self._start(self._pump_out())
        try:
            # connecting and each probe message are bounded by themselves; this bounds their sum
            async with asyncio.timeout(2 * self.spec.timeout_s):
                await self.run(lambda link: link.build())
                self.bandwidth_bytes_per_s = await self.run(lambda link: link.probe())
            self.is_built = True
            self._start(self._watch_peer())
        except TimeoutError as error:
            self.fail("building the link took too long")
            raise LinkBrokenError("building the link took too long") from error
        except LinkBrokenError:
            raise
        except Exception as error:
            raise LinkBrokenError(f"building the link failed: {error}") from error

    def run(self, job: Callable[[Link], T]) -> "asyncio.Future[T]":
        """Queue a job on the link's thread; when it raises, the link ends."""
        future = self._thread.submit(functools.partial(self._run_or_abort, job))
        future.add_done_callback(self._note_outcome)
        return future

    def ranges(self, blocks: PoolBlocks) -> RangeMover:
        """Return what moves ranges over this link."""
        if self._mover is None:
            make = MappedRanges if self.spec.is_shared_memory else MessageRanges
            self._mover = make(blocks, theirs=self._peer_layout)
        return self._mover

    def learn_bandwidth(self, num_bytes: int, elapsed_s: float) -> None:
        """Take one operation into the estimate; on the link's thread."""
        seen = num_bytes / max(elapsed_s, 1e-6)
        self.bandwidth_bytes_per_s += _LEARNING_RATE * (seen - self.bandwidth_bytes_per_s)

    def fail(self, reason: str, failure: FailureReason = FailureReason.LINK_BROKEN) -> None:
        """End the link: running operations raise, at the peer too. Idempotent."""
        if self.ended.done():
            return
        self.failure = failure
        self.ended.set_result(reason)
        # an abort may block for as long as the driver pleases
        self._aborting = run_in_thread(
            f"abort-{self.spec.link_id}", functools.partial(self._link.abort, reason)
        )

    async def close(self, reason: str) -> None:
        """End the link if it lives, and free everything it had; goes on when the caller is not."""
        self.fail(reason)
        if self._close_task is None:
            self._close_task = self._loop.create_task(self._free())
        await asyncio.shield(self._close_task)

    def forget_peer(self) -> None:
        """Wait for the peer's reads no longer: nothing of ours is written any more."""
        if self._unread_task is not None:
            self._unread_task.cancel()

    async def wait_peer_ready(self) -> None:
        """Wait until the sending side has built its end too; or raise LinkBrokenError."""
        ready = asyncio.ensure_future(self.peer_ready.wait())
        try:
            either: set[asyncio.Future[Any]] = {ready, self.ended}
            await asyncio.wait(
                either, timeout=self.spec.timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            ready.cancel()
        if self.ended.done():
            raise LinkBrokenError(self.ended.result())
        if not self.peer_ready.is_set():
            raise LinkBrokenError("the peer did not get ready in time")

    async def send_ready(self) -> None:
        """Tell the decode side that this end is built and probed."""
        await self._control.send(LinkReady())

    async def _free(self) -> None:
        assert self._aborting is not None
        await self._aborting
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._control.close()
        self._thread.submit(self._link.close)
        self._thread.stop()
        self._unread_task = self._loop.create_task(self._watch_unread())
        await asyncio.wait({self._thread.ended}, timeout=self.spec.timeout_s)
        if not self._thread.ended.done():
            # nothing interrupts a step of building, which ends at its own deadline
            logger.warning("link %s: its thread has not ended yet", self.spec.link_id)

    async def _watch_unread(self) -> None:
        try:
            # until then the peer has not even been told, and the thread may read what it sends
            await asyncio.shield(self._thread.ended)
            # its buffers with it: what refers to this object may go round in circles
            self._mover = None
            if self.spec.is_sender:
                await self._link.wait_unread()
        finally:
            self.unread.set_result(None)

    def _run_or_abort(self, job: Callable[[Link], T]) -> T:
        try:
            return job(self._link)
        except BaseException as error:
            # now, not when the loop hears of it: the job behind this one would post its operation
            # where the peer has posted this one's
            self._link.abort(str(error) or type(error).__name__)
            raise

    def _post_entry(self, key: str, value: bytes) -> None:
        # called on the link's thread
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, StoreEntry(key, value))

    def _note_outcome(self, future: "asyncio.Future[Any]") -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            is_timeout = isinstance(error, LinkTimeoutError)
            self.fail(
                str(error) or type(error).__name__,
                FailureReason.TIMEOUT if is_timeout else FailureReason.LINK_BROKEN,
            )

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(self._loop.create_task(coroutine))

    async def _watch_peer(self) -> None:
        """End the link when the peer is silent: a network that lost it closes no stream.

        The decode side asks, the prefill side answers. Counts periods and not seconds: of a pause
        of this very process only one is seen.
        """
        period_s = self.spec.timeout_s / _NUM_PERIODS
        while self._num_missed < _NUM_PERIODS:
            if self.spec.is_sender:
                # its periods begin with what it hears, and so with the other side's
                self._is_heard.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(period_s):
                        await self._is_heard.wait()
                        continue
            else:
                if self._num_missed % 2 == 0:
                    self._outbox.put_nowait(LinkAlive())
                await asyncio.sleep(period_s)
            self._num_missed += 1
        self.fail("the peer is silent on the control stream", FailureReason.TIMEOUT)

    async def _pump_in(self) -> None:
        try:
            while True:
                message = await self._control.receive()
                self._num_missed = 0
                self._is_heard.set()
                if isinstance(message, StoreEntry):
                    self._store.deliver(message.key, message.value)
                elif isinstance(message, LinkReady):
                    self.peer_ready.set()
                elif not isinstance(message, LinkAlive):
                    self.fail(f"unexpected control message {type(message).__name__}")
                    return
                elif self.spec.is_sender:
                    self._outbox.put_nowait(LinkAlive())
        except ControlClosedError as error:
            self.fail(f"control stream ended: {error}")

    async def _pump_out(self) -> None:
        try:
            while True:
                await self._control.send(await self._outbox.get())
        except ControlClosedError as error:
            self.fail(f"control stream ended: {error}")
