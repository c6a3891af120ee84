"""Requests that find no choice: they wait, in order and bounded, up to their deadline."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from relevo.v1 import state_pb2

from router.errors import NoWorkers, QueueFull, RequestTimeout
from router.request import EVERYBODY, Tenant
from tests.fake_workers import FakeDecodeWorker, expected_tokens
from tests.integration.router.conftest import PROMPT, FakeCluster, collect


async def test_before_the_first_readiness_nobody_waits(cluster: FakeCluster) -> None:
    router = await cluster.start_router(wait_ready=False)
    assert router.status()["state"] == "starting"
    with pytest.raises(NoWorkers) as caught:
        await collect(cluster.generate())
    assert caught.value.retry_after_s > 0
    assert cluster.metric("relevo_admission_rejected_total", reason="no_workers") == 1


async def test_after_it_a_request_waits_for_a_worker(cluster: FakeCluster) -> None:
    prefill = await cluster.add_prefill()
    await cluster.add_decode()
    router = await cluster.start_router()
    cluster.forget(prefill)
    await prefill.stop()
    await cluster.until(lambda: not router.is_ready())
    assert router.status()["state"] == "unavailable"
    waiting = asyncio.create_task(collect(generation := cluster.generate()))
    await cluster.until(lambda: router.num_waiting == 1)
    await asyncio.sleep(0.3)
    await cluster.add_prefill("prefill-1")
    assert await waiting == expected_tokens(PROMPT, 5)
    report = generation.report
    assert report.queue_s >= 0.3
    assert report.queue_s + report.route_s + report.prefill_wait_s + report.prefill_s + (
        report.wire_s
    ) == pytest.approx(report.first_token_s, abs=1e-9)


async def test_a_deadline_ends_the_wait(cluster: FakeCluster) -> None:
    prefill = await cluster.add_prefill()
    await cluster.add_decode()
    router = await cluster.start_router()
    cluster.forget(prefill)
    await prefill.stop()
    await cluster.until(lambda: not router.is_ready())
    started_s = time.monotonic()
    with pytest.raises(NoWorkers):
        await collect(cluster.generate(timeout_s=0.3))
    assert 0.25 < time.monotonic() - started_s < 15


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_deadline_ends_a_running_request(cluster: FakeCluster, leg: str) -> None:
    prefill = await cluster.add_prefill(prefill_s=30.0 if leg == "prefill" else 0.0)
    decode = await cluster.add_decode(step_s=30.0)
    await cluster.start_router()
    with pytest.raises(RequestTimeout):
        await collect(cluster.generate(timeout_s=0.3))
    await cluster.until(lambda: prefill.num_open == decode.num_open == 0)


def known_load(cluster: FakeCluster) -> state_pb2.WorkerLoad:
    """What the router knows of the decode worker."""
    [load] = [each.load for each in cluster.router.loads() if each.pool == "decode"]
    return load


async def test_full_workers_make_requests_wait_and_then_refuse(cluster: FakeCluster) -> None:
    await cluster.add_prefill()
    decode = await cluster.add_decode(max_num_seqs=1)
    router = await cluster.start_router(max_waiting_requests=2)
    may_decode = asyncio.Event()

    async def decode_later(offset: int) -> None:
        await may_decode.wait()

    decode.on_token = decode_later

    def report_load() -> None:
        decode.load.num_running = min(decode.num_open, 1)
        decode.load.num_waiting = max(decode.num_open - 1, 0)
        decode.touch()

    tasks = []
    for number in range(4):
        tasks.append(asyncio.create_task(collect(cluster.generate(max_tokens=3))))
        await cluster.until(lambda n=number: decode.num_open + router.num_waiting == n + 1)
        report_load()
        await cluster.until(lambda: known_load(cluster) == decode.load)
    assert (decode.num_open, router.num_waiting) == (2, 2)
    with pytest.raises(QueueFull) as caught:
        await collect(cluster.generate())
    assert caught.value.retry_after_s >= 1
    # Whoever asks first is told the same, and it counts as well.
    assert not router.has_room(EVERYBODY, 0)
    with pytest.raises(QueueFull) as caught:
        router.check_room(EVERYBODY, 0)
    assert caught.value.retry_after_s >= 1
    assert cluster.metric("relevo_admission_rejected_total", reason="queue_full") == 2
    router.check_room(EVERYBODY, -1)
    may_decode.set()
    while not all(task.done() for task in tasks):
        report_load()
        await asyncio.sleep(0.02)
    assert [task.result() for task in tasks] == [expected_tokens(PROMPT, 3)] * 4
    assert router.has_room(EVERYBODY, 0)


async def test_a_burst_finds_no_room_before_any_of_it_waits(cluster: FakeCluster) -> None:
    await cluster.add_prefill()
    await cluster.add_decode(max_num_seqs=1)
    router = await cluster.start_router(max_waiting_requests=2)
    burst = [cluster.generate(max_tokens=1, request_id=str(number)) for number in range(4)]
    assert router.num_waiting == 0
    assert not router.has_room(EVERYBODY, 0)
    assert router.has_room(EVERYBODY, 1)
    assert router.has_room(Tenant(name="other"), 0)
    await burst.pop().aclose()  # one that never began
    assert router.has_room(EVERYBODY, 0)
    for generation in burst:
        await collect(generation)
    await cluster.until(lambda: router.num_running == 0)
    assert router.has_room(EVERYBODY, 0)


async def test_the_default_bound_follows_the_workers(cluster: FakeCluster) -> None:
    await cluster.add_prefill(max_num_seqs=3)
    await cluster.add_decode(max_num_seqs=5)
    router = await cluster.start_router()
    assert router.max_waiting == 32


async def test_stopping_the_router_ends_what_waits_and_what_runs(cluster: FakeCluster) -> None:
    await cluster.add_prefill()
    decode = await cluster.add_decode(step_s=30.0)
    router = await cluster.start_router()
    running = asyncio.create_task(collect(cluster.generate()))
    await cluster.until(lambda: decode.num_open == 1)
    await router.stop()
    with pytest.raises(NoWorkers):
        await running
    await cluster.until(lambda: decode.num_open == 0)


async def test_each_leg_gets_what_is_left_of_the_deadline(cluster: FakeCluster) -> None:
    decodes = [await cluster.add_decode(f"decode-{n}", step_s=0.05) for n in range(2)]
    prefill = await cluster.add_prefill()
    router = await cluster.start_router()
    cluster.forget(prefill)
    await prefill.stop()
    await cluster.until(lambda: not router.is_ready())
    waiting = asyncio.create_task(collect(cluster.generate(max_tokens=9, timeout_s=10.0)))
    await cluster.until(lambda: router.num_waiting == 1)
    await asyncio.sleep(0.5)

    def migrating(worker: FakeDecodeWorker) -> Callable[[int], Awaitable[None]]:
        async def migrate(offset: int) -> None:
            if offset == 5 and not all(each.requests for each in decodes):
                worker.migrate_after = 5

        return migrate

    for worker in decodes:
        worker.on_token = migrating(worker)
    again = await cluster.add_prefill("prefill-1")
    assert await waiting == expected_tokens(PROMPT, 9)
    [first_s, second_s] = sorted((w.times_left_s[0] for w in decodes), reverse=True)
    for left_s in ([first_s, second_s], again.times_left_s):
        assert 0.0 < left_s[1] < left_s[0] - 0.2
        assert left_s[0] < 9.5


async def test_what_waited_past_its_deadline_reaches_no_worker(cluster: FakeCluster) -> None:
    prefill, decode = await cluster.add_prefill(), await cluster.add_decode()
    router = await cluster.start_router()
    cluster.forget(prefill)
    await prefill.stop()
    await cluster.until(lambda: not router.is_ready())
    waiting = [
        asyncio.create_task(collect(cluster.generate(timeout_s=0.2, request_id=f"late-{number}")))
        for number in range(5)
    ]
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(error) for error in ended} == {NoWorkers}
    again = await cluster.add_prefill("prefill-1")
    assert await collect(cluster.generate()) == expected_tokens(PROMPT, 5)
    assert len(again.requests) == len(decode.requests) == 1
