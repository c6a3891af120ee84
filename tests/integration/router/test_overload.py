"""Storms of errors, and consumers that do not read: both stay bounded."""

import asyncio
import time

import pytest

from router.errors import GenerationFailed, SlowReader
from router.generation import MAX_UNREAD_TOKENS
from router.retry_quota import FLOOR, FLOOR_PER_S, SHARE
from tests.fake_workers import expected_tokens
from tests.integration.router.conftest import PROMPT, FakeCluster, collect


async def test_workers_that_fail_every_request_are_not_asked_much_more_often_for_it(
    cluster: FakeCluster,
) -> None:
    workers = [await cluster.add_prefill(f"prefill-{rank}", error="broken") for rank in range(3)]
    await cluster.add_decode()
    await cluster.start_router()
    num_requests, started_s = 80, time.monotonic()
    outcomes = await asyncio.gather(
        *(collect(cluster.generate(request_id=str(number))) for number in range(num_requests)),
        return_exceptions=True,
    )
    assert {type(each) for each in outcomes} == {GenerationFailed}
    num_attempts = sum(len(worker.requests) for worker in workers)
    floor = FLOOR + FLOOR_PER_S * (time.monotonic() - started_s)
    assert num_requests < num_attempts <= num_requests * (1 + SHARE) + floor
    # It is a storm that ends: once they are well again, so are requests.
    for worker in workers:
        worker.error = ""
    assert await collect(cluster.generate()) == expected_tokens(PROMPT, 5)


async def test_a_consumer_that_does_not_read_is_ended_and_others_are_not(
    cluster: FakeCluster,
) -> None:
    await cluster.add_prefill()
    decode = await cluster.add_decode(max_model_len=8192)
    await cluster.start_router()
    lazy = cluster.generate(max_tokens=4 * MAX_UNREAD_TOKENS, request_id="lazy")
    await anext(lazy)
    await cluster.until(lambda: bool(decode.num_cancelled), timeout_s=30.0)
    assert await collect(cluster.generate()) == expected_tokens(PROMPT, 5)
    rest = await anext(lazy)
    assert MAX_UNREAD_TOKENS < len(rest.token_ids) < MAX_UNREAD_TOKENS + 64
    with pytest.raises(SlowReader):
        await anext(lazy)
    await lazy.aclose()


async def test_a_consumer_that_reads_on_gets_it_all(cluster: FakeCluster) -> None:
    await cluster.add_prefill()
    await cluster.add_decode(max_model_len=8192)
    await cluster.start_router()
    num_tokens = MAX_UNREAD_TOKENS + 200
    generation = cluster.generate(max_tokens=num_tokens)
    assert await collect(generation) == expected_tokens(PROMPT, num_tokens)
