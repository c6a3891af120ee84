import asyncio

import pytest

from router.errors import QueueFull
from router.waiting_queue import WaitingQueue


class Slots:
    """Choices that exist; taking one uses it up."""

    def __init__(self) -> None:
        self.free = 0

    def try_pick(self) -> str | None:
        if self.free == 0:
            return None
        self.free -= 1
        return "choice"


def queue_of(limit: int = 10) -> WaitingQueue[str]:
    return WaitingQueue(limit=lambda: limit, retry_after_s=lambda: 3.0)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_choice_is_taken_at_once() -> None:
    slots, queue = Slots(), queue_of()
    slots.free = 1
    assert await queue.take(slots.try_pick, timeout_s=1, is_admitted=False) == "choice"
    assert len(queue) == 0


async def test_waiters_are_served_in_order_and_lost_ones_first() -> None:
    slots, queue, order = Slots(), queue_of(), []

    async def wait(name: str, *, is_admitted: bool = False) -> None:
        await queue.take(slots.try_pick, timeout_s=5, is_admitted=is_admitted)
        order.append(name)

    tasks = []
    for name in ("a", "b", "c"):
        tasks.append(asyncio.create_task(wait(name)))
        await settle()
    tasks.append(asyncio.create_task(wait("lost", is_admitted=True)))
    await settle()
    for _ in range(4):
        slots.free = 1
        queue.wake()
        await settle()
    assert order == ["lost", "a", "b", "c"]
    await asyncio.gather(*tasks)


async def test_a_newcomer_does_not_overtake() -> None:
    slots, queue = Slots(), queue_of()
    first = asyncio.create_task(queue.take(slots.try_pick, timeout_s=5, is_admitted=False))
    await settle()
    slots.free = 1
    second = asyncio.create_task(queue.take(slots.try_pick, timeout_s=5, is_admitted=False))
    await settle()
    assert not second.done()
    queue.wake()
    await settle()
    assert first.done()
    slots.free = 1
    queue.wake()
    assert await second == "choice"


async def test_one_wake_serves_as_many_as_there_are_choices() -> None:
    slots, queue = Slots(), queue_of()
    tasks = [
        asyncio.create_task(queue.take(slots.try_pick, timeout_s=5, is_admitted=False))
        for _ in range(5)
    ]
    await settle()
    slots.free = 3
    queue.wake()
    await asyncio.sleep(0.01)
    assert sum(task.done() for task in tasks) == 3
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(queue) == 0


async def test_a_full_queue_refuses_new_requests_only() -> None:
    slots, queue = Slots(), queue_of(limit=1)
    first = asyncio.create_task(queue.take(slots.try_pick, timeout_s=5, is_admitted=False))
    await settle()
    with pytest.raises(QueueFull) as caught:
        await queue.take(slots.try_pick, timeout_s=5, is_admitted=False)
    assert caught.value.retry_after_s == 3.0
    lost = asyncio.create_task(queue.take(slots.try_pick, timeout_s=5, is_admitted=True))
    await settle()
    assert len(queue) == 2
    slots.free = 2
    queue.wake()
    await asyncio.gather(first, lost)


async def test_the_time_to_wait_is_bounded() -> None:
    queue = queue_of()
    with pytest.raises(TimeoutError):
        await queue.take(Slots().try_pick, timeout_s=0.01, is_admitted=False)
    assert len(queue) == 0


async def test_a_cancelled_head_passes_its_turn_on() -> None:
    slots, queue = Slots(), queue_of()
    first = asyncio.create_task(queue.take(slots.try_pick, timeout_s=5, is_admitted=False))
    await settle()
    second = asyncio.create_task(queue.take(slots.try_pick, timeout_s=5, is_admitted=False))
    await settle()
    slots.free = 1
    queue.wake()
    first.cancel()
    assert await second == "choice"
    with pytest.raises(asyncio.CancelledError):
        await first
    assert len(queue) == 0
