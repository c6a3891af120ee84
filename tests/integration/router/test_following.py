"""What the router knows of its workers, and how it learns it."""

import asyncio
from collections.abc import Sequence

import pytest

from router import predictions
from router.worker_view import DECODE, PREFILL, WorkerKey
from rpc.description import WorkerDescription
from tests.fake_worker_base import FakeWorker
from tests.fake_workers import expected_tokens
from tests.integration.router.conftest import PROMPT, FakeCluster, collect

HASHES = [bytes([number]) * 32 for number in range(8)]


def num_indexed(cluster: FakeCluster, worker: FakeWorker) -> int:
    index = cluster.router.index(worker.pool)
    index.check_integrity()
    return index.num_entries(WorkerKey(worker.worker_id, worker.incarnation))


async def test_the_index_follows_snapshot_and_events(cluster: FakeCluster) -> None:
    prefill = await cluster.add_prefill(block_hashes=HASHES[:3])
    await cluster.add_decode()
    await cluster.start_router()
    assert num_indexed(cluster, prefill) == 3
    prefill.publish(stored=HASHES[3:6], removed=HASHES[:1])
    await cluster.until(lambda: num_indexed(cluster, prefill) == 5)


async def test_a_gap_in_the_state_stream_brings_a_new_snapshot(cluster: FakeCluster) -> None:
    prefill = await cluster.add_prefill(block_hashes=HASHES[:3])
    await cluster.add_decode()
    await cluster.start_router()
    prefill.block_hashes = HASHES[:7]  # no event tells of these
    prefill.num_skipped = 1
    await cluster.until(lambda: num_indexed(cluster, prefill) == 7)
    assert prefill.num_streams >= 2
    await cluster.until(lambda: cluster.router.status()["state"] == "ready")
    assert await collect(cluster.generate()) == expected_tokens(PROMPT, 5)


async def test_a_lost_worker_is_scrubbed_at_once_and_shows_zero(cluster: FakeCluster) -> None:
    prefill = await cluster.add_prefill(block_hashes=HASHES)
    prefill.load.num_running = 3
    await cluster.add_decode()
    router = await cluster.start_router()
    assert router.status()["workers"][1]["running"] == 3
    await prefill.stop()
    await cluster.until(lambda: cluster.states()["prefill-0"] == "lost")
    assert num_indexed(cluster, prefill) == 0
    row = router.status()["workers"][1]
    assert (row["running"], row["kv"], row["links"]) == (0, {}, [])
    assert [each.pool for each in router.loads()] == [DECODE]


async def test_both_pools_have_their_own_index(cluster: FakeCluster) -> None:
    prefill = await cluster.add_prefill(block_hashes=HASHES[:2])
    decode = await cluster.add_decode(block_hashes=HASHES[:5])
    router = await cluster.start_router()
    await cluster.until(lambda: num_indexed(cluster, decode) == 5)
    assert router.index(PREFILL).num_entries() == num_indexed(cluster, prefill) == 2


async def test_decode_workers_hear_of_new_and_lost_prefill_workers(cluster: FakeCluster) -> None:
    decode = await cluster.add_decode()
    router = await cluster.start_router(local_prefill="auto")
    first = await cluster.add_prefill("prefill-0")
    await cluster.until(lambda: len(decode.peers) == 1)
    assert decode.peers[0].address == first.description.address  # type: ignore[union-attr]
    second = await cluster.add_prefill("prefill-1")
    await cluster.until(lambda: len(decode.peers) == 2)
    cluster.forget(first)
    await first.stop()
    await cluster.until(lambda: [p.worker.worker_id for p in decode.peers] == ["prefill-1"])
    assert decode.peers[0].worker.incarnation == second.incarnation
    assert router.is_ready()


async def test_the_model_is_what_the_workers_say(cluster: FakeCluster) -> None:
    await cluster.add_prefill(max_model_len=100)
    await cluster.add_decode(max_model_len=200)
    router = await cluster.start_router()
    assert router.model is not None
    assert (router.model.model_id, router.model.max_model_len) == ("fake", 100)


async def test_loads_keep_the_last_metrics(cluster: FakeCluster) -> None:
    decode = await cluster.add_decode()
    decode.load.metrics.add(name="relevo_kv_leases_open", value=2.0)
    router = await cluster.start_router(local_prefill="auto")
    del decode.load.metrics[:]
    decode.load.num_running = 1
    await cluster.until(lambda: router.loads()[0].load.num_running == 1)
    assert [sample.value for sample in router.loads()[0].load.metrics] == [2.0]


async def test_a_failing_discovery_costs_no_worker(cluster: FakeCluster) -> None:
    await cluster.add_prefill()
    await cluster.add_decode()
    router = await cluster.start_router()

    async def fail() -> Sequence[WorkerDescription]:
        raise RuntimeError("the control plane is away")

    cluster.discovery.describe = fail  # type: ignore[method-assign]
    await asyncio.sleep(0.6)
    assert router.status()["state"] == "ready"
    assert await collect(cluster.generate()) == expected_tokens(PROMPT, 5)


async def test_a_worker_missing_from_one_view_stays_in_use(cluster: FakeCluster) -> None:
    prefill = await cluster.add_prefill()
    await cluster.add_decode()
    router = await cluster.start_router()
    cluster.forget(prefill)
    await asyncio.sleep(0.6)
    assert router.status()["state"] == "ready"
    assert await collect(cluster.generate()) == expected_tokens(PROMPT, 5)


async def test_another_process_at_the_address_is_not_taken_for_the_worker(
    cluster: FakeCluster,
) -> None:
    prefill = await cluster.add_prefill()
    await cluster.add_decode()
    await cluster.start_router(wait_ready=False)
    prefill.incarnation += 1  # it says another name than discovery
    await asyncio.sleep(0.6)
    assert not cluster.router.is_ready()


async def test_after_a_death_under_load_nothing_of_the_worker_is_left(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictions, "PREDICTION_TTL_S", 0.05)
    for number in range(2):
        await cluster.add_prefill(f"prefill-{number}", block_hashes=HASHES[:4])
        await cluster.add_decode(f"decode-{number}", block_hashes=HASHES[:4], step_s=0.02)
    router = await cluster.start_router()
    running = [asyncio.create_task(collect(cluster.generate(max_tokens=20))) for _ in range(8)]
    victims = [cluster.workers[0], cluster.workers[1]]
    await cluster.until(lambda: all(victim.num_open > 0 for victim in victims[1:]))
    for victim in victims:
        cluster.forget(victim)
        await victim.stop()
    assert await asyncio.gather(*running) == [expected_tokens(PROMPT, 20)] * 8
    await cluster.until(lambda: list(cluster.states().values()).count("lost") == 2)
    for victim in victims:
        assert num_indexed(cluster, victim) == 0
        assert router.index(victim.pool).num_entries() == 4
    assert {report.worker.worker_id for report in router.loads()} == {"prefill-1", "decode-1"}
    # Predictions of all these requests are over with the second look after them.
    for _ in range(2):
        await asyncio.sleep(0.06)
        await collect(cluster.generate())
    assert router.index(PREFILL).num_predictions <= 2 * len(PROMPT)
    assert cluster.metric("relevo_requests_finished_total", finish_reason="error") == 0
