"""Which pool blocks the operations of one reception may write, until it is over."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


class PoolWrites:
    """Invariant: no operation that begins after `close` writes; those that had begun by then are
    named by it, and come to `end_quarantine` each, later, on the event loop."""

    def __init__(self, end_quarantine: Callable[[Sequence[int]], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._end_quarantine = end_quarantine
        self._lock = threading.Lock()
        self._running: list[Sequence[int]] = []
        self._is_closed = False

    @contextmanager
    def of(self, block_ids: Sequence[int]) -> Iterator[bool]:
        """Around one operation, on its link's thread: whether it may write these blocks."""
        with self._lock:
            may_write = not self._is_closed
            if may_write:
                self._running.append(block_ids)
        try:
            yield may_write
        finally:
            if may_write:
                self._end(block_ids)

    def close(self) -> list[int]:
        """Let none begin any more; return the blocks that are still being written."""
        with self._lock:
            self._is_closed = True
            return [block_id for block_ids in self._running for block_id in block_ids]

    def _end(self, block_ids: Sequence[int]) -> None:
        with self._lock:
            self._running.remove(block_ids)
            is_late = self._is_closed
        if is_late and not self._loop.is_closed():
            # behind whatever is done with the answer of `close`
            self._loop.call_soon_threadsafe(self._end_quarantine, block_ids)
