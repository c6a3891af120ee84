"""A client that leaves a write lying is ended at its limit, and nobody else."""

import asyncio
import time

import pytest

from api.errors import ApiError, Verdict
from api.stall_guard import StallGuard

LIMIT_S = 0.1


async def never() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("idle_s", [0.0, 0.05, 0.13])
async def test_a_write_that_does_not_end_ends_the_stream_at_the_limit(idle_s: float) -> None:
    began_s: list[float] = []

    async def stream() -> None:
        with StallGuard(LIMIT_S) as guard:
            await guard.watch(asyncio.sleep(0))
            await asyncio.sleep(idle_s)
            began_s.append(time.monotonic())
            await guard.watch(never())

    with pytest.raises(ApiError) as caught:
        await stream()
    assert time.monotonic() - began_s[0] >= 0.99 * LIMIT_S
    assert caught.value.verdict is Verdict.CANCELLED
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_many_writes_and_long_pauses_are_no_stall() -> None:
    with StallGuard(LIMIT_S) as guard:
        for _ in range(6):
            await guard.watch(asyncio.sleep(0.4 * LIMIT_S))
        await asyncio.sleep(2.5 * LIMIT_S)
        await guard.watch(asyncio.sleep(0))
    await asyncio.sleep(1.5 * LIMIT_S)  # no timer is left


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
    time.sleep(1.5 * LIMIT_S)  # noqa: ASYNC251 - both come due in one turn of the loop
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
