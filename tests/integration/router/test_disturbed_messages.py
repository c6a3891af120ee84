"""Messages are lost, doubled, late and swapped: a request ends right, once, and leaves nothing."""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.worker_view import WorkerKey
from tests.fake_worker_base import FakeState
from tests.fake_workers import FakeDecodeService, FakePrefillService, expected_tokens
from tests.integration.router.conftest import PROMPT, FakeCluster, collect

NUM_REQUESTS = 200
NUM_AT_ONCE = 20
MAX_DELAY_S = 0.02


class Disturbance:
    """Disturbs the messages of streams, each with this chance."""

    def __init__(self, seed: int, *, chance: float) -> None:
        self.rng = random.Random(seed)
        self.chance = chance
        self.num_disturbed = {"drop": 0, "double": 0, "delay": 0, "swap": 0}

    def apply_to(self, monkeypatch: pytest.MonkeyPatch, service: type, method: str) -> None:
        """Every stream of this method from now on."""
        original = getattr(service, method)

        def disturbed(servicer: Any, request: Any, context: Any) -> AsyncIterator[Any]:
            return self._disturb(original(servicer, request, context))

        monkeypatch.setattr(service, method, disturbed)

    async def _disturb(self, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        held: Any = None
        async for message in messages:
            kind = self._draw()
            if kind == "drop":
                continue
            if kind == "swap" and held is None:
                held = message
                continue
            if kind == "delay":
                await asyncio.sleep(self.rng.random() * MAX_DELAY_S)
            yield message
            if kind == "double":
                yield message
            if held is not None:
                yield held
                held = None
        if held is not None:
            yield held

    def _draw(self) -> str:
        if self.rng.random() >= self.chance:
            return ""
        kind = self.rng.choice(sorted(self.num_disturbed))
        self.num_disturbed[kind] += 1
        return kind


async def run_many(cluster: FakeCluster, *, max_tokens: int) -> None:
    gate = asyncio.Semaphore(NUM_AT_ONCE)

    async def one(number: int) -> None:
        async with gate:
            tokens = await collect(
                cluster.generate(max_tokens=max_tokens, request_id=f"request-{number}")
            )
        assert tokens == expected_tokens(PROMPT, max_tokens)

    await asyncio.gather(*(one(number) for number in range(NUM_REQUESTS)))


async def test_of_two_hundred_disturbed_requests_each_ends_right(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that the retries stay within what a router allows itself.
    disturbance = Disturbance(1, chance=0.03)
    disturbance.apply_to(monkeypatch, FakeDecodeService, "Decode")
    disturbance.apply_to(monkeypatch, FakePrefillService, "Prefill")
    for number in range(2):
        await cluster.add_prefill(f"prefill-{number}", max_num_seqs=100)
        await cluster.add_decode(f"decode-{number}", max_num_seqs=100)
    await cluster.start_router(migration_limit=30)
    await run_many(cluster, max_tokens=8)
    assert min(disturbance.num_disturbed.values()) > 5, disturbance.num_disturbed
    assert cluster.metric("relevo_requests_finished_total", finish_reason="length") == NUM_REQUESTS
    assert cluster.metric("relevo_generation_tokens_total") == 8 * NUM_REQUESTS


async def test_disturbed_state_streams_lose_no_request_and_no_entry_of_the_index(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturbance = Disturbance(3, chance=0.3)
    disturbance.apply_to(monkeypatch, FakeState, "WatchState")
    workers = [await cluster.add_prefill(), await cluster.add_decode()]
    router = await cluster.start_router(wait_ready=False)
    await cluster.until(router.is_ready)
    stopping = asyncio.Event()

    async def change_caches() -> None:
        number = 0
        while not stopping.is_set():
            number += 1
            for worker in workers:
                name = hashlib.sha256(b"%d" % number).digest()
                worker.publish(stored=[name], removed=worker.block_hashes[:-3])
            await asyncio.sleep(0.01)

    changing = asyncio.create_task(change_caches())
    await run_many(cluster, max_tokens=3)
    stopping.set()
    await changing
    assert min(disturbance.num_disturbed.values()) > 2, disturbance.num_disturbed
    disturbance.chance = 0.0

    def knows_all() -> bool:
        return all(
            router.index(worker.pool).num_entries(WorkerKey(worker.worker_id, worker.incarnation))
            == len(worker.block_hashes)
            for worker in workers
        )

    await cluster.until(lambda: knows_all() and router.status()["state"] == "ready")


async def test_while_tokens_arrive_a_mute_state_stream_ends_no_request(
    cluster: FakeCluster,
) -> None:
    await cluster.add_prefill()
    decodes = [await cluster.add_decode(f"decode-{n}", step_s=0.25) for n in range(2)]
    await cluster.start_router()
    generation = cluster.generate(max_tokens=14)
    tokens = [*(await anext(generation)).token_ids]
    for worker in decodes:
        worker.is_mute = True
    async for batch in generation:
        tokens += batch.token_ids
    assert tokens == expected_tokens(PROMPT, 14)
    assert generation.report.num_migrations == 0
    assert cluster.states()["decode-0"] == cluster.states()["decode-1"] == "lost"
    assert not cluster.router.is_ready()
    for worker in decodes:
        worker.is_mute = False
    await cluster.until(cluster.router.is_ready)
