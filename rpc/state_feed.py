"""A worker's state as a stream for each ingress: snapshot of the prefix cache, changes, load; its
finished spans ride along.

    publish() ──► mirror of the cached hashes ──► snapshot of each new stream
        └───────► pending changes of each open stream, merged ──► one message per round

A stream starts with its snapshot and takes every change after it, in one step of the event loop,
so the two fit exactly. Whoever reads too slowly gets its stream ended and starts over.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from relevo.v1 import state_pb2

from faults.plan import fault_point_async
from rpc.feed_pace import FeedPace, RoundTimer
from telemetry.span_outbox import SpanOutbox

_LOGGER = logging.getLogger(__name__)

Response = state_pb2.WatchStateResponse

SNAPSHOT_CHUNK_HASHES: Final = 4096  # 128 KiB of digests
MAX_PENDING_HASHES: Final = 65_536  # 2 MiB of digests, the size of two whole messages


@dataclass(slots=True, eq=False)
class _Subscriber:
    """What one stream has yet to say. Invariant: no hash is both removed and stored, except one
    that was there before, left and came back.
    """

    removed: dict[bytes, None] = field(default_factory=dict)  # ordered sets
    stored: dict[bytes, None] = field(default_factory=dict)
    is_cleared: bool = False
    is_changed: bool = False
    is_ended: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, removed: Iterable[bytes], stored: Iterable[bytes], *, cleared: bool) -> None:
        """Merge one more change into what is pending."""
        if cleared:
            self.removed.clear()
            self.stored.clear()
            self.is_cleared = True
        for block_hash in removed:
            self.stored.pop(block_hash, None)
            self.removed[block_hash] = None
        self.stored.update(dict.fromkeys(stored))

    def take(self) -> state_pb2.WatchStateResponse.BlockEvents | None:
        """Return what is pending as one message and forget it."""
        if not (self.removed or self.stored or self.is_cleared):
            return None
        events = Response.BlockEvents(
            cleared=self.is_cleared, removed=self.removed, stored=self.stored
        )
        self.removed.clear()
        self.stored.clear()
        self.is_cleared = False
        return events

    def notify(self) -> None:
        """Let the stream speak again."""
        self.is_changed = True
        self.wake.set()

    def end(self) -> None:
        """Let the stream end, and hold nothing for it meanwhile."""
        self.is_ended = True
        self.take()
        self.wake.set()


class StateFeed:
    """Owns the mirror of the prefix map and all open streams. Use it on one event loop."""

    def __init__(
        self,
        *,
        hello: Callable[[], state_pb2.WatchStateResponse.Hello],
        load: Callable[[], state_pb2.WorkerLoad],
        # The same object for as long as nothing changes: then a load goes without.
        metric_samples: Callable[[], Iterable[state_pb2.MetricSample]] = tuple,
        spans: SpanOutbox | None = None,
        pace: FeedPace | None = None,
    ) -> None:
        self._hello = hello
        self._load = load
        self._metric_samples = metric_samples
        self._spans = spans or SpanOutbox()
        self._pace = pace or FeedPace()
        self._hashes: dict[bytes, None] = {}
        self._subscribers: set[_Subscriber] = set()
        self._is_closed = False

    @property
    def num_subscribers(self) -> int:
        """Streams that are open."""
        return len(self._subscribers)

    def publish(
        self,
        *,
        removed: Iterable[bytes] = (),
        stored: Iterable[bytes] = (),
        cleared: bool = False,
    ) -> None:
        """Take one change of the prefix map: cleared, then removed, then stored."""
        removed, stored = tuple(removed), tuple(stored)
        if cleared:
            self._hashes.clear()
        for block_hash in removed:
            self._hashes.pop(block_hash, None)
        self._hashes.update(dict.fromkeys(stored))
        for subscriber in self._subscribers:
            if subscriber.is_ended:
                continue
            subscriber.add(removed, stored, cleared=cleared)
            if len(subscriber.removed) + len(subscriber.stored) > MAX_PENDING_HASHES:
                _LOGGER.warning("A state stream is read too slowly and was ended")
                subscriber.end()
            else:
                subscriber.notify()

    def touch(self) -> None:
        """Say that the load has changed."""
        for subscriber in self._subscribers:
            subscriber.notify()

    def close(self) -> None:
        """End all streams, and new ones at once."""
        self._is_closed = True
        for subscriber in self._subscribers:
            subscriber.end()

    async def watch(self) -> AsyncIterator[state_pb2.WatchStateResponse]:
        """Stream the state to one reader until it is too slow or the feed is closed."""
        subscriber = _Subscriber(is_ended=self._is_closed)
        self._subscribers.add(subscriber)
        snapshot = tuple(self._hashes)
        sequence = 0
        try:
            async for message in self._messages(subscriber, snapshot):
                message.sequence = sequence
                sequence += 1
                verdict = await fault_point_async("control_message")
                if verdict == "drop":
                    continue
                yield message
                if verdict == "duplicate":
                    yield message
        finally:
            self._subscribers.discard(subscriber)

    async def _messages(
        self, subscriber: _Subscriber, snapshot: tuple[bytes, ...]
    ) -> AsyncIterator[state_pb2.WatchStateResponse]:
        if subscriber.is_ended:
            return
        yield Response(hello=self._hello())
        for chunk in _snapshot_chunks(snapshot):
            yield Response(snapshot_chunk=chunk)
        timer = RoundTimer(self._pace)
        next_span = self._spans.num_ended
        told: Iterable[state_pb2.MetricSample] = ()
        while await _round_is_due(subscriber, timer):
            subscriber.is_changed = False
            samples = self._metric_samples() if timer.start_round() else told
            events = subscriber.take()
            if events is not None:
                yield Response(block_events=events)
            spans, next_span = self._spans.batch(next_span)
            message = Response(load=self._load(), spans=spans)
            if samples is not told:
                message.load.metrics.extend(samples)
                told = samples
            yield message


def _snapshot_chunks(
    hashes: tuple[bytes, ...],
) -> Iterable[state_pb2.WatchStateResponse.SnapshotChunk]:
    remaining = iter(hashes)
    num_left = len(hashes)
    while num_left > SNAPSHOT_CHUNK_HASHES:
        yield Response.SnapshotChunk(block_hashes=islice(remaining, SNAPSHOT_CHUNK_HASHES))
        num_left -= SNAPSHOT_CHUNK_HASHES
    yield Response.SnapshotChunk(block_hashes=remaining, last=True)


async def _round_is_due(subscriber: _Subscriber, timer: RoundTimer) -> bool:
    """Wait for the next round; False when the stream shall end instead."""
    while not subscriber.is_ended:
        wait_s = timer.wait_s(is_changed=subscriber.is_changed)
        if wait_s == 0.0:
            return True
        subscriber.wake.clear()
        try:
            async with asyncio.timeout(wait_s):
                await subscriber.wake.wait()
        except TimeoutError:
            continue
    return False
