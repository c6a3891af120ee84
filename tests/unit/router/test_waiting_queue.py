import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import QueueFull
from router.fair_line import FairLine, Ticket
from router.request import Tenant
from router.waiting_queue import Place, WaitingQueue
from tests.fakes import FakeClock


class Slots:
    """Choices that exist; taking one uses it up."""

    def __init__(self) -> None:
        self.free = 0

    def try_pick(self) -> str | None:
        if self.free == 0:
            return None
        self.free -= 1
        return "choice"


def queue_of(limit: int = 10, clock: FakeClock | None = None) -> WaitingQueue[str]:
    return WaitingQueue(limit=lambda: limit, expected_turn_s=lambda: 3.0, now=clock or FakeClock())


def place(
    tenant: str = "",
    *,
    weight: float = 1.0,
    priority: int = 1,
    num_tokens: int = 10,
    is_admitted: bool = False,
) -> Place:
    return Place(
        tenant=Tenant(name=tenant, weight=weight),
        priority=priority,
        num_tokens=num_tokens,
        is_admitted=is_admitted,
    )


LOST = place(is_admitted=True)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_choice_is_taken_at_once() -> None:
    slots, queue = Slots(), queue_of()
    slots.free = 1
    assert await queue.take(slots.try_pick, place(), timeout_s=100) == "choice"
    assert len(queue) == 0


async def test_waiters_are_served_in_order_and_lost_ones_first() -> None:
    slots, queue, order = Slots(), queue_of(), []

    async def wait(name: str, *, is_admitted: bool = False) -> None:
        await queue.take(slots.try_pick, place(is_admitted=is_admitted), timeout_s=500)
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
    first = asyncio.create_task(queue.take(slots.try_pick, place(), timeout_s=500))
    await settle()
    slots.free = 1
    second = asyncio.create_task(queue.take(slots.try_pick, place(), timeout_s=500))
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
        asyncio.create_task(queue.take(slots.try_pick, place(), timeout_s=500)) for _ in range(5)
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
    first = asyncio.create_task(queue.take(slots.try_pick, place(), timeout_s=500))
    await settle()
    with pytest.raises(QueueFull) as caught:
        await queue.take(slots.try_pick, place(), timeout_s=500)
    assert caught.value.retry_after_s == 6.0  # two turns
    lost = asyncio.create_task(queue.take(slots.try_pick, LOST, timeout_s=500))
    await settle()
    assert len(queue) == 2
    slots.free = 2
    queue.wake()
    await asyncio.gather(first, lost)


async def test_the_time_to_wait_is_bounded() -> None:
    queue = queue_of()
    with pytest.raises(TimeoutError):
        await queue.take(Slots().try_pick, place(), timeout_s=0.01)
    assert len(queue) == 0


async def test_a_cancelled_head_passes_its_turn_on() -> None:
    slots, queue = Slots(), queue_of()
    first = asyncio.create_task(queue.take(slots.try_pick, place(), timeout_s=500))
    await settle()
    second = asyncio.create_task(queue.take(slots.try_pick, place(), timeout_s=500))
    await settle()
    slots.free = 1
    queue.wake()
    first.cancel()
    assert await second == "choice"
    with pytest.raises(asyncio.CancelledError):
        await first
    assert len(queue) == 0


class Crowd:
    """Requests that wait, and the order in which they got on."""

    def __init__(self, limit: int = 100, clock: FakeClock | None = None) -> None:
        self.slots, self.queue = Slots(), queue_of(limit, clock)
        self.order: list[str] = []
        self.tasks: dict[str, asyncio.Task[str]] = {}

    async def join(self, name: str, where: Place, timeout_s: float = 1e6) -> asyncio.Task[str]:
        async def wait() -> str:
            choice = await self.queue.take(self.slots.try_pick, where, timeout_s=timeout_s)
            self.order.append(name)
            return choice

        task = self.tasks[name] = asyncio.create_task(wait())
        await settle()
        return task

    async def give(self, num_slots: int = 1) -> None:
        for _ in range(num_slots):
            self.slots.free += 1
            self.queue.wake()
            await settle()

    async def leave(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        assert len(self.queue) == 0


async def test_better_classes_go_first() -> None:
    crowd = Crowd()
    for name, priority in (("low", 2), ("normal", 1), ("high", 0)):
        await crowd.join(name, place(priority=priority))
    await crowd.give(3)
    assert crowd.order == ["high", "normal", "low"]
    await crowd.leave()


async def test_tenants_share_by_tokens_not_by_requests() -> None:
    crowd = Crowd()
    for number in range(12):
        await crowd.join(f"long-{number}", place("long", num_tokens=300))
        await crowd.join(f"short-{number}", place("short", num_tokens=100))
    await crowd.give(12)
    served = [name.split("-")[0] for name in crowd.order]
    # Three short ones weigh as much as a long one.
    assert served.count("short") == 9
    assert served.count("long") == 3
    await crowd.leave()


async def test_a_tenant_of_twice_the_weight_gets_twice_the_tokens() -> None:
    crowd = Crowd()
    for number in range(12):
        await crowd.join(f"heavy-{number}", place("heavy", weight=2.0))
        await crowd.join(f"light-{number}", place("light"))
    await crowd.give(9)
    assert sum(name.startswith("heavy") for name in crowd.order) == 6
    await crowd.leave()


async def test_output_that_no_turn_counted_is_charged_too() -> None:
    crowd = Crowd()
    for number in range(3):
        await crowd.join(f"wordy-{number}", place("wordy"))
        await crowd.join(f"terse-{number}", place("terse"))
    crowd.queue.charge(Tenant(name="wordy"), 1000)
    await crowd.give(3)
    assert crowd.order == ["terse-0", "terse-1", "terse-2"]
    await crowd.leave()


async def test_time_without_requests_is_not_saved_up() -> None:
    crowd = Crowd()
    crowd.queue.charge(Tenant(name="busy"), 1000)
    for number in range(4):
        await crowd.join(f"busy-{number}", place("busy"))
    for number in range(4):
        await crowd.join(f"idle-{number}", place("idle"))
    await crowd.give(4)
    assert sum(name.startswith("idle") for name in crowd.order) == 2
    await crowd.leave()


async def test_a_flood_drowns_only_its_own() -> None:
    crowd = Crowd(limit=4)
    for number in range(4):
        await crowd.join(f"flood-{number}", place("flood"))
    guest = await crowd.join("guest", place("guest"))
    await settle()
    assert not guest.done()
    assert isinstance(crowd.tasks["flood-3"].exception(), QueueFull)
    more = await crowd.join("flood-4", place("flood"))
    assert isinstance(more.exception(), QueueFull)
    await crowd.leave()


async def test_each_class_has_its_own_bound() -> None:
    crowd = Crowd(limit=1)
    await crowd.join("normal", place())
    high = await crowd.join("high", place(priority=0))
    assert not high.done()
    assert isinstance((await crowd.join("too many", place())).exception(), QueueFull)
    await crowd.leave()


async def test_who_cannot_make_its_deadline_is_refused_at_once() -> None:
    clock = FakeClock()
    crowd = Crowd(clock=clock)
    for number in range(9):
        await crowd.join(f"{number}", place())
    late = await crowd.join("late", place(), timeout_s=10.0)  # ten turns of 3 s
    error = late.exception()
    assert isinstance(error, QueueFull)
    assert error.retry_after_s == 30.0
    in_time = await crowd.join("in time", place(), timeout_s=20.0)
    assert not in_time.done()
    await crowd.leave()


async def test_the_hint_follows_how_fast_the_queue_drains() -> None:
    clock = FakeClock()
    crowd = Crowd(clock=clock)
    for number in range(20):
        await crowd.join(f"{number}", place())
    assert crowd.queue.retry_after_s() == 60.0  # nothing seen yet: 21 turns of 3 s, bounded
    for _ in range(8):
        await crowd.give()
        clock.advance(0.5)
    assert crowd.queue.retry_after_s() == pytest.approx(13 * 0.5, rel=0.1)
    await crowd.leave()


async def test_room_is_told_without_joining() -> None:
    crowd = Crowd(limit=2)
    assert crowd.queue.has_room(Tenant(name="a"), 1)
    for number in range(2):
        await crowd.join(f"a-{number}", place("a"))
    assert not crowd.queue.has_room(Tenant(name="a"), 1)
    assert crowd.queue.has_room(Tenant(name="b"), 1)  # it would displace one of a's
    assert crowd.queue.has_room(Tenant(name="a"), 0)
    assert crowd.queue.has_room(Tenant(name="a"), 2)
    await crowd.give()
    assert crowd.queue.has_room(Tenant(name="a"), 1)
    await crowd.leave()


async def test_a_queue_for_nobody_has_room_while_nobody_must_wait() -> None:
    crowd = Crowd(limit=0)
    assert crowd.queue.has_room(Tenant(), 1)  # a worker may be free
    lost = await crowd.join("lost", LOST)
    assert not crowd.queue.has_room(Tenant(), 1)
    await crowd.give()
    await lost


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), max_size=30),
    st.integers(0, 4),
)
def test_who_is_said_to_be_refused_is_exactly_who_is(
    asking: list[tuple[str, int]], limit: int
) -> None:
    line: FairLine[None] = FairLine()
    for tenant, priority in asking:
        told = line.refuses(tenant, priority, limit=limit)
        ticket = Ticket(item=None, tenant=tenant, priority=priority, num_tokens=1)
        assert (line.add(ticket, limit=limit) is ticket) == told
        line.check_integrity()
