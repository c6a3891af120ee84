"""A cancel in any phase reaches both legs, and nothing stays behind."""

import asyncio
import random

import pytest

from router.request import FinishReason
from tests.fake_workers import FakeDecodeWorker, FakePrefillWorker, expected_tokens
from tests.integration.router.conftest import PROMPT, FakeCluster, collect


async def start(cluster: FakeCluster) -> tuple[FakePrefillWorker, FakeDecodeWorker]:
    prefill, decode = await cluster.add_prefill(), await cluster.add_decode()
    await cluster.start_router()
    return prefill, decode


async def test_before_it_started_nothing_is_sent(cluster: FakeCluster) -> None:
    prefill, decode = await start(cluster)
    generation = cluster.generate()
    await generation.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(generation)
    assert generation.report.finish_reason == "abort"
    assert not prefill.requests
    assert not decode.requests


async def test_in_the_moment_it_starts_nothing_stays(cluster: FakeCluster) -> None:
    await start(cluster)
    generation = cluster.generate()
    reading = asyncio.create_task(collect(generation))
    await asyncio.sleep(0)
    await generation.aclose()
    await asyncio.gather(reading, return_exceptions=True)
    assert cluster.router.num_running == 0
    assert generation.report.finish_reason == "abort"


async def test_during_prefill_both_legs_are_cancelled(cluster: FakeCluster) -> None:
    prefill, decode = await start(cluster)
    prefill.prefill_s = 30.0
    generation = cluster.generate()
    reading = asyncio.create_task(anext(generation))  # type: ignore[arg-type]
    await cluster.until(lambda: prefill.num_open == decode.num_open == 1)
    await generation.aclose()
    await cluster.until(lambda: prefill.num_cancelled == decode.num_cancelled == 1)
    with pytest.raises(StopAsyncIteration):
        await reading


async def test_during_decode_the_kv_is_given_back(cluster: FakeCluster) -> None:
    prefill, decode = await start(cluster)
    decode.step_s = 30.0
    generation = cluster.generate()
    await anext(generation)
    await asyncio.sleep(0.1)
    await generation.aclose()
    await cluster.until(lambda: decode.num_cancelled == 1)
    await cluster.until(lambda: prefill.released == [prefill.requests[0].transfer_id])


async def test_an_answer_of_one_token_gives_back_the_kv_that_nobody_fetched(
    cluster: FakeCluster,
) -> None:
    prefill, decode = await start(cluster)
    decode.step_s = 30.0  # its call is cancelled before it has said that it took anything
    assert await collect(cluster.generate(max_tokens=1)) == expected_tokens(PROMPT, 1)
    await cluster.until(lambda: prefill.released == [prefill.requests[0].transfer_id])


async def test_a_cancelled_reader_may_close_afterwards(cluster: FakeCluster) -> None:
    _, decode = await start(cluster)
    decode.step_s = 30.0
    reading = asyncio.create_task(collect(cluster.generate()))
    await cluster.until(lambda: decode.num_open == 1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await cluster.until(lambda: decode.num_cancelled == 1)


async def test_in_the_queue_it_just_leaves(cluster: FakeCluster) -> None:
    prefill, _ = await start(cluster)
    cluster.forget(prefill)
    await prefill.stop()
    await cluster.until(lambda: not cluster.router.is_ready())
    generations = [cluster.generate() for _ in range(3)]
    readers = [asyncio.create_task(collect(generation)) for generation in generations]
    await cluster.until(lambda: cluster.router.num_waiting == 3)
    await generations[0].aclose()
    await cluster.until(lambda: cluster.router.num_waiting == 2)
    await asyncio.gather(*(generation.aclose() for generation in generations))
    assert cluster.router.num_waiting == 0
    await asyncio.gather(*readers, return_exceptions=True)


async def test_a_consumer_that_ended_it_well_says_so(cluster: FakeCluster) -> None:
    await start(cluster)
    generation = cluster.generate(max_tokens=200)
    await anext(generation)
    await generation.aclose(FinishReason.STOP)
    assert generation.report.finish_reason == "stop"
    assert cluster.metric("relevo_requests_finished_total", finish_reason="stop") == 1


async def test_two_hundred_cancels_leave_nothing(cluster: FakeCluster) -> None:
    prefill, decode = await start(cluster)
    prefill.prefill_s, decode.step_s = 0.01, 0.005
    prefill.max_num_seqs = decode.max_num_seqs = 1000
    rng = random.Random(1)

    async def one() -> None:
        generation = cluster.generate(max_tokens=50)
        reading = asyncio.create_task(collect(generation))
        await asyncio.sleep(rng.random() * 0.15)
        if rng.random() < 0.5:
            reading.cancel()
        await generation.aclose()
        await asyncio.gather(reading, return_exceptions=True)

    await asyncio.gather(*(one() for _ in range(200)))
    await cluster.until(lambda: prefill.num_open == decode.num_open == 0)
    cluster.assert_nothing_in_flight()
    # Each is counted, and once.
    counts = {
        name: sum(s.value for s in cluster.sink.samples() if s.name == name)
        for name in ("relevo_requests_finished_total", "relevo_admission_rejected_total")
    }
    assert sum(counts.values()) == 200, counts
    assert cluster.metric("relevo_requests_finished_total", finish_reason="abort") > 0
