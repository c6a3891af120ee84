"""Several choices of one prompt: served together, ended one by one, and alone after a loss."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from router.errors import NeverFits
from router.request import FinishReason
from tests.fake_workers import FakeDecodeWorker, expected_tokens
from tests.integration.router.conftest import PROMPT, FakeCluster, collect_choices


def expected_choices(num_choices: int, num_tokens: int) -> dict[int, list[int]]:
    return {
        index: expected_tokens(PROMPT, num_tokens, choice_index=index)
        for index in range(num_choices)
    }


@pytest.mark.parametrize("mode", ["never", "auto"])
async def test_all_choices_come_from_one_request(cluster: FakeCluster, mode: str) -> None:
    prefill = await cluster.add_prefill(num_cached_tokens=4)
    decode = await cluster.add_decode()
    await cluster.start_router(local_prefill=mode)
    generation = cluster.generate(num_choices=3)
    assert await collect_choices(generation) == expected_choices(3, 5)
    assert len(prefill.requests) == (mode == "never")
    [sent] = decode.requests
    assert (sent.request.choice_index, sent.request.num_choices) == (0, 3)
    report = generation.report
    assert (report.num_prompt_tokens, report.num_completion_tokens) == (len(PROMPT), 15)
    assert report.finish_reason == "length"
    assert cluster.metric("relevo_requests_finished_total", finish_reason="length") == 1
    assert cluster.metric("relevo_generation_tokens_total") == 15


@pytest.mark.parametrize("how", ["dies", "drains"])
async def test_each_choice_goes_on_alone_when_the_decode_worker_is_lost(
    cluster: FakeCluster, how: str
) -> None:
    await cluster.add_prefill()
    decodes = [await cluster.add_decode(f"decode-{n}", step_s=0.005) for n in range(2)]
    await cluster.start_router()
    lost: list[FakeDecodeWorker] = []

    def losing(worker: FakeDecodeWorker) -> Callable[[int], Awaitable[None]]:
        async def lose(offset: int) -> None:
            if offset != 6 or lost:
                return
            lost.append(worker)
            if how == "drains":
                worker.migrate_after = 6
                return
            cluster.forget(worker)
            asyncio.get_running_loop().create_task(worker.stop())
            await asyncio.sleep(30)

        return lose

    for worker in decodes:
        worker.on_token = losing(worker)
    generation = cluster.generate(max_tokens=12, num_choices=3)
    assert await collect_choices(generation) == expected_choices(3, 12)
    [second] = [worker for worker in decodes if worker not in lost]
    replays = [request.request for request in second.requests]
    assert sorted(replay.choice_index for replay in replays) == [0, 1, 2]
    assert {replay.num_choices for replay in replays} == {1}
    assert len({replay.request_id for replay in replays}) == 3
    for replay in replays:
        output = expected_tokens(PROMPT, 6, choice_index=replay.choice_index)
        assert list(replay.token_ids) == PROMPT + output
        assert replay.num_prompt_tokens == len(PROMPT)
    assert generation.report.num_completion_tokens == 36


async def test_choices_without_a_token_start_again_together(cluster: FakeCluster) -> None:
    await cluster.add_prefill(num_refusals=1)
    decode = await cluster.add_decode()
    await cluster.start_router()
    assert await collect_choices(cluster.generate(num_choices=2)) == expected_choices(2, 5)
    assert {request.request.num_choices for request in decode.requests} == {2}


async def test_one_choice_ends_early_and_the_others_go_on(cluster: FakeCluster) -> None:
    await cluster.add_prefill()
    decode = await cluster.add_decode(step_s=0.01)
    await cluster.start_router()
    generation = cluster.generate(max_tokens=8, num_choices=3)
    tokens: dict[int, list[int]] = {}
    async for batch in generation:
        tokens.setdefault(batch.choice_index, []).extend(batch.token_ids)
        if batch.choice_index == 1:
            assert len(tokens) <= 3
            generation.end_choice(1)
    await generation.aclose()
    expected = expected_choices(3, 8)
    assert len(tokens.pop(1)) < 8
    assert tokens == {0: expected[0], 2: expected[2]}
    assert decode.cancelled == [(decode.requests[0].transfer_id, 1)]
    assert generation.report.finish_reason == "length"


async def test_the_last_choice_may_be_the_consumers_to_end(cluster: FakeCluster) -> None:
    await cluster.add_prefill()
    decode = await cluster.add_decode(step_s=0.02)
    await cluster.start_router()
    generation = cluster.generate(max_tokens=100, num_choices=2)
    await anext(generation)
    generation.end_choice(0)
    await generation.aclose(FinishReason.STOP)
    assert generation.report.finish_reason == "stop"
    await cluster.until(lambda: decode.num_open == 0)


async def test_a_choice_ended_while_it_waits_for_a_worker_asks_for_none(
    cluster: FakeCluster,
) -> None:
    await cluster.add_prefill()
    first = await cluster.add_decode(step_s=0.01, migrate_after=2)
    await cluster.start_router()
    generation = cluster.generate(max_tokens=6, num_choices=2)
    tokens: dict[int, list[int]] = {}
    second: FakeDecodeWorker | None = None
    async for batch in generation:
        tokens.setdefault(batch.choice_index, []).extend(batch.token_ids)
        if second is None and sum(map(len, tokens.values())) == 4:
            first.num_refusals = 100
            await asyncio.sleep(0.1)
            generation.end_choice(1)
            second = await cluster.add_decode("decode-1")
    await generation.aclose()
    assert tokens[0] == expected_tokens(PROMPT, 6)
    assert second is not None
    assert [request.request.choice_index for request in second.requests] == [0]


async def test_more_choices_than_any_worker_runs_never_fit(cluster: FakeCluster) -> None:
    await cluster.add_prefill()
    await cluster.add_decode(max_num_seqs=4)
    await cluster.start_router()
    generation = cluster.generate(num_choices=5)
    with pytest.raises(NeverFits, match="5 choices"):
        await anext(generation)
    await generation.aclose()
    assert await collect_choices(cluster.generate(num_choices=4)) == expected_choices(4, 5)
