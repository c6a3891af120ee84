"""The good ways through the router: pairs, a decode worker alone, merging, reports."""

import asyncio

import pytest
from relevo.v1 import common_pb2

from router.request import FinishReason, Tenant
from tests.fake_workers import expected_tokens
from tests.integration.router.conftest import PROMPT, FakeCluster, collect


async def test_a_pair_serves_and_both_legs_know_each_other(cluster: FakeCluster) -> None:
    prefill, decode = await cluster.add_prefill(), await cluster.add_decode()
    await cluster.start_router()
    generation = cluster.generate()
    assert await collect(generation) == expected_tokens(PROMPT, 5)
    [sent], [decoding] = prefill.requests, decode.requests
    assert sent.transfer_id == decoding.transfer_id != 0
    assert sent.decode_worker.worker_id == "decode-0"
    assert decoding.prefill_worker.incarnation == prefill.incarnation
    assert generation.report.finish_reason == "length"
    assert prefill.num_cancelled == decode.num_cancelled == 0


async def test_the_first_token_comes_once_whoever_repeats_it(cluster: FakeCluster) -> None:
    await cluster.add_prefill()
    decode = await cluster.add_decode()
    await cluster.start_router()
    for repeats in (True, False):
        decode.repeats_first = repeats
        assert await collect(cluster.generate()) == expected_tokens(PROMPT, 5)


async def test_the_first_token_does_not_wait_for_the_decode_worker(cluster: FakeCluster) -> None:
    await cluster.add_prefill()
    decode = await cluster.add_decode(step_s=30.0)
    await cluster.start_router()
    generation = cluster.generate()
    async with asyncio.timeout(20):
        batch = await anext(generation)
    assert batch.token_ids == expected_tokens(PROMPT, 1)
    await generation.aclose()
    assert generation.report.finish_reason == "abort"
    await cluster.until(lambda: decode.num_cancelled == 1)


async def test_one_token_is_the_whole_request(cluster: FakeCluster) -> None:
    await cluster.add_prefill()
    await cluster.add_decode()
    await cluster.start_router()
    generation = cluster.generate(max_tokens=1)
    batch = await anext(generation)
    assert batch.token_ids == expected_tokens(PROMPT, 1)
    assert batch.finish_reason is FinishReason.LENGTH
    with pytest.raises(StopAsyncIteration):
        await anext(generation)
    await generation.aclose()


@pytest.mark.parametrize(
    ("mode", "prefill_id"), [("never", "prefill-0"), ("fallback", "prefill-0"), ("auto", "")]
)
async def test_the_mode_decides_who_prefills(
    cluster: FakeCluster, mode: str, prefill_id: str
) -> None:
    # Handing over to an idle worker costs latency: with `auto` the decode worker goes on alone.
    await cluster.add_prefill()
    await cluster.add_decode()
    await cluster.start_router(local_prefill=mode)
    generation = cluster.generate()
    assert await collect(generation) == expected_tokens(PROMPT, 5)
    assert generation.report.prefill_worker_id == prefill_id


async def test_fallback_goes_on_alone_without_a_linked_prefill_worker(cluster: FakeCluster) -> None:
    await cluster.add_prefill()
    await cluster.add_decode(auto_link=False)
    router = await cluster.start_router(local_prefill="fallback", wait_ready=False)
    await cluster.until(router.is_ready)
    assert router.status()["state"] == "degraded"
    generation = cluster.generate()
    assert await collect(generation) == expected_tokens(PROMPT, 5)
    assert generation.report.prefill_worker_id == ""


async def test_without_prefill_workers_the_decode_worker_does_it_all(cluster: FakeCluster) -> None:
    decode = await cluster.add_decode(num_cached_tokens=4)
    decode.timings = common_pb2.WorkerTimings(prefill_wait_s=1e-6, prefill_s=1e-5)
    await cluster.start_router(local_prefill="auto")
    generation = cluster.generate()
    assert await collect(generation) == expected_tokens(PROMPT, 5)
    report = generation.report
    assert (report.cached_prefill, report.cached_decode, report.computed) == (0, 4, 6)
    assert report.prefill_s == pytest.approx(1e-5)


async def test_the_parts_of_a_report_sum_exactly(cluster: FakeCluster) -> None:
    prefill = await cluster.add_prefill(prefill_s=0.05, num_cached_tokens=8)
    decode = await cluster.add_decode(step_s=0.01, kv_transfer_bytes=10_000)
    prefill.timings = common_pb2.WorkerTimings(prefill_wait_s=0.01, prefill_s=0.03)
    decode.timings = common_pb2.WorkerTimings(
        transfer_tail_s=0.001, slot_wait_s=0.002, first_decode_s=0.003, kv_transfer_s=0.004
    )
    await cluster.start_router()
    generation = cluster.generate()
    await collect(generation)
    report = generation.report
    parts = report.queue_s + report.route_s + report.prefill_wait_s
    assert parts + report.prefill_s + report.wire_s == pytest.approx(report.first_token_s, abs=1e-9)
    assert report.wire_s > 0.0
    assert report.total_time_s == pytest.approx(report.prompt_time_s + report.completion_s)
    assert (report.cached_prefill, report.cached_decode, report.computed) == (8, 0, 2)
    assert report.cached_tokens == 8
    assert (report.transfer_tail_s, report.slot_wait_s) == pytest.approx((0.001, 0.002))
    assert (report.first_decode_s, report.kv_transfer_s) == pytest.approx((0.003, 0.004))
    assert report.kv_transfer_bytes == 10_000
    assert report.completion_s >= 0.03
    assert report.decode_worker_id == report.last_decode_worker_id == "decode-0"


async def test_a_slow_consumer_gets_the_finish_with_the_last_tokens(cluster: FakeCluster) -> None:
    await cluster.add_prefill()
    decode = await cluster.add_decode()
    await cluster.start_router()
    generation = cluster.generate()
    first = await anext(generation)
    await cluster.until(lambda: bool(decode.requests) and not decode.num_open)
    await asyncio.sleep(0.3)
    rest = await anext(generation)
    assert first.token_ids + rest.token_ids == expected_tokens(PROMPT, 5)
    assert rest.finish_reason is FinishReason.LENGTH
    await generation.aclose()


async def test_a_burst_spreads_over_the_workers(cluster: FakeCluster) -> None:
    # Reports lag: no load changes while the burst is routed.
    prefills = [await cluster.add_prefill(f"prefill-{n}", prefill_s=0.2) for n in range(4)]
    decodes = [await cluster.add_decode(f"decode-{n}") for n in range(4)]
    await cluster.start_router()
    await cluster.until(lambda: all(len(d.load.links) == 4 for d in decodes))
    await asyncio.sleep(0.15)
    for worker in decodes + prefills:
        worker.tick_s = 10.0
    await asyncio.sleep(0.15)
    prompts = [[n * 37 + k for k in range(200)] for n in range(16)]
    results = await asyncio.gather(*(collect(cluster.generate(prompt)) for prompt in prompts))
    assert results == [expected_tokens(prompt, 5) for prompt in prompts]
    assert [len(worker.requests) for worker in prefills] == [4] * 4
    assert all(2 <= len(worker.requests) <= 6 for worker in decodes)


async def test_a_cached_prefix_attracts_its_request(cluster: FakeCluster) -> None:
    prefills = [await cluster.add_prefill(f"prefill-{n}") for n in range(3)]
    await cluster.add_decode()
    await cluster.start_router()
    prompt = list(range(200))
    for _ in range(4):
        await collect(cluster.generate(prompt))
        await asyncio.sleep(0.15)
    assert sorted(len(worker.requests) for worker in prefills) == [0, 0, 4]


async def test_routes_show_the_terms_of_the_cost(cluster: FakeCluster) -> None:
    await cluster.add_prefill()
    await cluster.add_decode()
    router = await cluster.start_router(local_prefill="auto")
    await collect(cluster.generate())
    [route] = router.status(num_routes=5)["routes"]
    assert route["chosen"]["decode"] == "decode-0"
    assert route["chosen"]["cost"]["total_s"] > 0
    assert route["next_best"]["prefill"] == "prefill-0"
    assert "routes" not in router.status()
    # Of another tenant's requests nothing is told, and they push none of its own out.
    await collect(cluster.generate(tenant=Tenant(name="bob"), request_id="other"))
    [own] = router.status(num_routes=1, tenant="")["routes"]
    assert own["request_id"] == route["request_id"]
    assert len(router.status(num_routes=5)["routes"]) == 2
    assert router.status(num_routes=5, tenant="alice")["routes"] == []


async def test_metrics_count_each_request_once(cluster: FakeCluster) -> None:
    await cluster.add_prefill(num_cached_tokens=4)
    await cluster.add_decode()
    await cluster.start_router()
    await collect(cluster.generate())
    assert cluster.metric("relevo_requests_finished_total", finish_reason="length") == 1
    assert cluster.metric("relevo_prompt_tokens_total", source="cached_prefill") == 4
    assert cluster.metric("relevo_prompt_tokens_total", source="computed") == 6
    assert cluster.metric("relevo_generation_tokens_total") == 5


async def test_who_gathers_is_woken_for_many_tokens_at_once_and_loses_none(
    cluster: FakeCluster,
) -> None:
    await cluster.add_prefill()
    await cluster.add_decode()
    await cluster.start_router()
    generation = cluster.generate(max_tokens=45)
    generation.gather(20)
    batches = [batch async for batch in generation]
    await generation.aclose()
    tokens = [token_id for batch in batches for token_id in batch.token_ids]
    assert tokens == expected_tokens(PROMPT, 45)
    sizes = [len(batch.token_ids) for batch in batches]
    assert all(size >= 20 for size in sizes[:-1])
    assert batches[-1].finish_reason is FinishReason.LENGTH
    assert generation.report.num_completion_tokens == 45
