"""However the workers fail, what is asked of them stays bounded, and spread out by chance."""

import asyncio
import random
import statistics

import pytest

from router import retry
from router.config import RouterConfig
from router.errors import GenerationFailed, RequestTimeout
from router.retry import FIRST_PAUSE_S, LONGEST_PAUSE_S, MAX_UNREACHED, Failure, RetryBudget
from router.retry_quota import FLOOR, SHARE, RetryQuota
from tests.fake_workers import FakeDecodeWorker, expected_tokens
from tests.integration.router.conftest import PROMPT, FakeCluster, collect

NUM_REQUESTS = 20


async def test_workers_that_all_fail_are_asked_a_little_more_than_once_for_each_request(
    cluster: FakeCluster,
) -> None:
    prefills = [await cluster.add_prefill(f"prefill-{n}", error="broken") for n in range(3)]
    decode = await cluster.add_decode(max_num_seqs=100)
    await cluster.start_router(migration_limit=2)
    ended = await asyncio.gather(
        *(collect(cluster.generate(request_id=f"r{n}")) for n in range(NUM_REQUESTS)),
        return_exceptions=True,
    )
    assert {type(error) for error in ended} == {GenerationFailed}
    num_asked = sum(len(worker.requests) for worker in prefills)
    most = NUM_REQUESTS * (1 + SHARE) + FLOOR + 5  # seconds, at most
    assert NUM_REQUESTS < num_asked <= min(most, 3 * NUM_REQUESTS)
    assert len(decode.requests) <= most


async def test_workers_that_refuse_are_asked_ever_more_rarely(cluster: FakeCluster) -> None:
    prefill = await cluster.add_prefill(num_refusals=1_000_000, tick_s=0.02)
    await cluster.add_decode()
    await cluster.start_router()
    ended = await asyncio.gather(
        *(collect(cluster.generate(timeout_s=1.0, request_id=f"r{n}")) for n in range(5)),
        return_exceptions=True,
    )
    assert {type(error) for error in ended} == {RequestTimeout}
    # 10, 20, 40, ... 500 ms, each between half of it and all: eight in a second, not fifty.
    assert 5 < prefill.num_refused <= 5 * 9


async def test_workers_nobody_reaches_end_a_request_after_a_bounded_number_of_calls(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "LONGEST_PAUSE_S", 0.05)
    prefill = await cluster.add_prefill(num_stale=1_000_000, tick_s=0.01)
    await cluster.add_decode()
    await cluster.start_router()
    with pytest.raises(GenerationFailed, match="no worker could be reached"):
        await collect(cluster.generate())
    assert 1_000_000 - prefill.num_stale == MAX_UNREACHED + 1


def test_pauses_grow_and_are_spread_by_chance() -> None:
    failure = Failure(cause="refused", message="full", was_admitted=False)
    firsts, lasts = [], []
    for seed in range(50):
        budget = RetryBudget(RouterConfig(), random.Random(seed), RetryQuota(lambda: 0.0))
        pauses = [budget.spend(failure) for _ in range(12)]
        assert all(0.5 * FIRST_PAUSE_S <= pause_s <= LONGEST_PAUSE_S for pause_s in pauses)
        firsts.append(pauses[0])
        lasts.append(pauses[-1])
    assert statistics.mean(lasts) > 20 * statistics.mean(firsts)
    assert statistics.stdev(lasts) > 0.1 * LONGEST_PAUSE_S


async def test_after_the_first_token_only_the_rest_is_asked_for(cluster: FakeCluster) -> None:
    await cluster.add_prefill()
    decodes = [await cluster.add_decode(f"decode-{n}", gap_at=6) for n in range(2)]
    decodes.append(await cluster.add_decode("decode-2", num_refusals=2))
    await cluster.start_router()
    assert await collect(cluster.generate(max_tokens=9)) == expected_tokens(PROMPT, 9)
    asked = [list(r.request.token_ids) for worker in decodes for r in worker.requests]
    assert all(tokens[: len(PROMPT)] == PROMPT for tokens in asked)
    lengths = sorted(len(tokens) - len(PROMPT) for tokens in asked)
    # One more where the prefill worker told it before the decode worker refused.
    assert lengths[0] == 0
    assert set(lengths[1:]) <= {6, 7}


async def test_a_poison_request_ends_after_its_limit_and_its_neighbours_do_not(
    cluster: FakeCluster,
) -> None:
    await cluster.add_prefill()
    decodes = [await cluster.add_decode(f"decode-{n}", step_s=0.01) for n in range(2)]
    await cluster.start_router(migration_limit=3)
    dead: list[FakeDecodeWorker] = []

    async def replace(worker: FakeDecodeWorker) -> None:
        cluster.forget(worker)
        await worker.stop()
        await asyncio.sleep(0.05)
        poison(await cluster.add_decode(worker.worker_id, step_s=0.01))

    def poison(worker: FakeDecodeWorker) -> None:
        async def die(offset: int) -> None:
            is_there = any(r.request.request_label == "poison" for r in worker.open_requests)
            if is_there and worker not in dead and offset >= 2:
                dead.append(worker)
                asyncio.get_running_loop().create_task(replace(worker))
            if worker in dead:
                await asyncio.sleep(30)

        worker.on_token = die

    for worker in decodes:
        poison(worker)
    neighbours = [
        asyncio.create_task(collect(cluster.generate(max_tokens=100, request_id=f"n{number}")))
        for number in range(6)
    ]
    await asyncio.sleep(0.1)
    with pytest.raises(GenerationFailed):
        await collect(cluster.generate(max_tokens=100, request_id="poison", label="poison"))
    assert len(dead) == 4
    assert await asyncio.gather(*neighbours) == [expected_tokens(PROMPT, 100)] * 6
