"""Who may write a reception's blocks, and until when."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kv_transfer.pool_writes import PoolWrites
from tests.unit.kv_transfer.fakes import eventually


class Operation:
    """An operation on a thread of its own that runs until it is told to end."""

    def __init__(self, writes: PoolWrites, block_ids: list[int]) -> None:
        self.may_write: bool | None = None
        self._begun, self._ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(writes, block_ids))
        self._thread.start()
        self._begun.wait()

    def end(self) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self, writes: PoolWrites, block_ids: list[int]) -> None:
        with writes.of(block_ids) as self.may_write:
            self._begun.set()
            self._ending.wait()


@contextmanager
def running(writes: PoolWrites, block_ids: list[int]) -> Iterator[Operation]:
    operation = Operation(writes, block_ids)
    try:
        yield operation
    finally:
        operation.end()


async def test_what_ends_in_time_is_named_to_nobody() -> None:
    ended: list[int] = []
    writes = PoolWrites(ended.extend)
    with running(writes, [1, 2]) as operation:
        assert operation.may_write
    assert writes.close() == []
    await asyncio.sleep(0.01)
    assert ended == []


async def test_what_runs_on_is_named_and_ends_later_on_the_event_loop() -> None:
    ended: list[int] = []
    writes = PoolWrites(ended.extend)
    first, second = Operation(writes, [1, 2]), Operation(writes, [7])
    assert writes.close() == [1, 2, 7]
    second.end()
    # behind whoever takes the blocks back after `close`
    assert ended == []
    await eventually(lambda: ended == [7])
    first.end()
    await eventually(lambda: ended == [7, 1, 2])


async def test_what_begins_too_late_writes_nothing_and_is_named_to_nobody() -> None:
    ended: list[int] = []
    writes = PoolWrites(ended.extend)
    assert writes.close() == []
    with running(writes, [1]) as operation:
        assert operation.may_write is False
    await asyncio.sleep(0.01)
    assert ended == []


async def test_an_operation_that_fails_ends_too() -> None:
    ended: list[int] = []
    writes = PoolWrites(ended.extend)
    try:
        with writes.of([3]):
            assert writes.close() == [3]
            raise ConnectionError("the link broke")
    except ConnectionError:
        pass
    await eventually(lambda: ended == [3])
