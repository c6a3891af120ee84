"""A client that leaves a write lying is ended at its limit, and nobody else."""

import asyncio

import pytest

from api.errors import ApiError, Verdict
from api.stall_guard import StallGuard
from tests.fake_time import FakeTimeLoop, in_fake_time

LIMIT_S = 0.1


async def never() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("idle_s", [0.0, 0.05, 0.13])
@in_fake_time
async def test_a_write_that_does_not_end_ends_the_stream_at_the_limit(idle_s: float) -> None:
    began_s: list[float] = []
    loop = asyncio.get_running_loop()

    async def stream() -> None:
        with StallGuard(LIMIT_S) as guard:
            await guard.watch(asyncio.sleep(0))
            await asyncio.sleep(idle_s)
            began_s.append(loop.time())
            await guard.watch(never())

    with pytest.raises(ApiError) as caught:
        await stream()
    assert loop.time() - began_s[0] == pytest.approx(LIMIT_S)
    assert caught.value.verdict is Verdict.CANCELLED
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@in_fake_time
async def test_many_writes_and_long_pauses_are_no_stall() -> None:
    with StallGuard(LIMIT_S) as guard:
        for _ in range(6):
            await guard.watch(asyncio.sleep(0.4 * LIMIT_S))
        await asyncio.sleep(2.5 * LIMIT_S)
        await guard.watch(asyncio.sleep(0))
    await asyncio.sleep(1.5 * LIMIT_S)  # no timer is left


@in_fake_time
async def test_a_cancel_from_elsewhere_is_a_cancel() -> None:
    async def stream() -> None:
        with StallGuard(LIMIT_S) as guard:
            await guard.watch(never())

    task = asyncio.create_task(stream())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    late = asyncio.create_task(stream())
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, FakeTimeLoop)
    loop.advance(1.5 * LIMIT_S)  # both come due in one turn of the loop
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
