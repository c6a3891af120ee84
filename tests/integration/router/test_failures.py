"""Nothing is lost: workers die, freeze, refuse, drain or misbehave, and the stream goes on."""

import asyncio
import time

import pytest

from router.errors import GenerationFailed, InvalidRequest, NeverFits
from rpc.errors import InvalidRequestError, TransferLostError
from tests.fake_worker_base import FakeWorker
from tests.fake_workers import FakeDecodeWorker, FakePrefillWorker, expected_tokens
from tests.integration.router.conftest import PROMPT, FakeCluster, collect


def die_once(cluster: FakeCluster, worker: FakeWorker) -> None:
    """Stop a worker as if it was killed; whoever asked for it stays unanswered."""
    cluster.forget(worker)
    asyncio.get_running_loop().create_task(worker.stop())


async def test_a_dead_prefill_worker_is_replaced_before_the_first_token(
    cluster: FakeCluster,
) -> None:
    prefills = [await cluster.add_prefill(f"prefill-{n}") for n in range(2)]
    decode = await cluster.add_decode()
    await cluster.start_router()
    dead: list[FakePrefillWorker] = []

    def dying(worker: FakePrefillWorker) -> object:
        async def die() -> None:
            if not dead:
                dead.append(worker)
                die_once(cluster, worker)
                await asyncio.sleep(30)

        return die

    for worker in prefills:
        worker.on_request = dying(worker)  # type: ignore[assignment]
    generation = cluster.generate()
    assert await collect(generation) == expected_tokens(PROMPT, 5)
    report = generation.report
    assert report.prefill_worker_id != dead[0].worker_id
    assert (report.num_attempts, report.num_migrations) == (2, 1)
    assert [r.epoch for r in decode.requests] == [1, 2]
    assert len({r.transfer_id for r in decode.requests}) == 2
    assert decode.num_cancelled == 1
    await cluster.until(lambda: "lost" in cluster.states().values())
    assert cluster.router.status()["state"] == "degraded"


@pytest.mark.parametrize("mode", ["never", "auto"])
async def test_a_dead_decode_worker_costs_no_token_and_doubles_none(
    cluster: FakeCluster, mode: str
) -> None:
    await cluster.add_prefill()
    decodes = [await cluster.add_decode(f"decode-{n}", step_s=0.01) for n in range(2)]
    await cluster.start_router(local_prefill=mode)
    dead: list[FakeDecodeWorker] = []

    def dying(worker: FakeDecodeWorker) -> object:
        async def die(offset: int) -> None:
            if offset == 6 and not dead:
                dead.append(worker)
                die_once(cluster, worker)
                await asyncio.sleep(30)

        return die

    for worker in decodes:
        worker.on_token = dying(worker)  # type: ignore[assignment]
    generation = cluster.generate(max_tokens=12)
    assert await collect(generation) == expected_tokens(PROMPT, 12)
    [survivor] = [worker for worker in decodes if worker not in dead]
    replay = survivor.requests[-1].request
    assert list(replay.token_ids) == PROMPT + expected_tokens(PROMPT, 6)
    assert replay.num_prompt_tokens == len(PROMPT)
    assert replay.sampling_params.max_tokens == 12
    report = generation.report
    assert report.last_decode_worker_id == survivor.worker_id
    assert report.decode_worker_id == dead[0].worker_id
    assert cluster.metric("relevo_migrations_total", cause="lost") == 1


async def test_a_frozen_decode_worker_is_given_up(cluster: FakeCluster) -> None:
    await cluster.add_prefill()
    decodes = [await cluster.add_decode(f"decode-{n}") for n in range(2)]
    await cluster.start_router()

    def freezing(worker: FakeDecodeWorker) -> object:
        async def freeze(offset: int) -> None:
            if offset == 3 and not any(each.is_frozen for each in decodes):
                worker.is_frozen = True

        return freeze

    for worker in decodes:
        worker.on_token = freezing(worker)  # type: ignore[assignment]
    started_s = time.monotonic()
    assert await collect(cluster.generate(max_tokens=8)) == expected_tokens(PROMPT, 8)
    assert 1.5 < time.monotonic() - started_s < 15
    assert cluster.router.status()["state"] == "degraded"
    for worker in decodes:
        worker.is_frozen = False
    await cluster.until(lambda: cluster.router.status()["state"] == "ready")


async def test_a_stuck_engine_is_given_up_though_its_process_speaks(cluster: FakeCluster) -> None:
    await cluster.add_prefill()
    decodes = [await cluster.add_decode(f"decode-{n}") for n in range(2)]
    await cluster.start_router()

    def hanging(worker: FakeDecodeWorker) -> object:
        async def hang(offset: int) -> None:
            if offset == 3 and not any(each.load.heartbeat_age_s for each in decodes):
                worker.load.heartbeat_age_s = 2.5
                await asyncio.sleep(30)

        return hang

    for worker in decodes:
        worker.on_token = hanging(worker)  # type: ignore[assignment]
    started_s = time.monotonic()
    assert await collect(cluster.generate(max_tokens=8)) == expected_tokens(PROMPT, 8)
    assert time.monotonic() - started_s < 15
    assert sorted(cluster.states().values()) == ["lost", "ready", "ready"]
    assert [worker.num_streams for worker in decodes] == [1, 1]
    for worker in decodes:
        worker.load.heartbeat_age_s = 0.0
    await cluster.until(lambda: cluster.router.status()["state"] == "ready")


async def test_a_prefill_worker_that_freezes_in_the_hand_over_is_given_up(
    cluster: FakeCluster,
) -> None:
    prefills = [await cluster.add_prefill(f"prefill-{n}") for n in range(2)]
    decode = await cluster.add_decode()
    await cluster.start_router()
    prefills[0].freezes_with_kv = prefills[1].freezes_with_kv = True
    generation = cluster.generate(max_tokens=8)
    tokens = [*(await anext(generation)).token_ids]
    assert tokens == expected_tokens(PROMPT, 1)
    [spare] = [worker for worker in prefills if not worker.requests]
    spare.freezes_with_kv = False
    started_s = time.monotonic()
    assert tokens + await collect(generation) == expected_tokens(PROMPT, 8)
    assert time.monotonic() - started_s < 15
    assert len(decode.requests[1].request.token_ids) == len(PROMPT) + 1
    for worker in prefills:
        worker.freezes_with_kv = worker.is_frozen = False
    await cluster.until(lambda: cluster.router.status()["state"] == "ready")


async def test_an_error_of_a_leg_reaches_the_client_soon_and_ends_the_other_leg(
    cluster: FakeCluster,
) -> None:
    await cluster.add_prefill(error="nan")
    decode = await cluster.add_decode()
    await cluster.start_router(migration_limit=1)
    started_s = time.monotonic()
    with pytest.raises(GenerationFailed, match="nan"):
        await collect(cluster.generate())
    assert time.monotonic() - started_s < 15
    await cluster.until(lambda: decode.num_cancelled == 2, 5.0)


async def test_a_decode_leg_that_does_not_start_ends_the_prefill_at_once(
    cluster: FakeCluster,
) -> None:
    prefill = await cluster.add_prefill()
    await cluster.add_decode(num_stale=1)
    await cluster.start_router()

    async def compute() -> None:
        if len(prefill.requests) == 1:
            await asyncio.sleep(30)

    prefill.on_request = compute
    answering = asyncio.create_task(collect(cluster.generate()))
    await cluster.until(lambda: prefill.num_cancelled == 1, 10.0)
    assert await answering == expected_tokens(PROMPT, 5)
    assert [len(prefill.released), prefill.num_cancelled] == [1, 1]


async def test_a_step_of_five_seconds_that_was_predicted_is_no_death(cluster: FakeCluster) -> None:
    await cluster.add_prefill()
    decodes = [await cluster.add_decode(f"decode-{n}") for n in range(2)]
    await cluster.start_router()

    def slow_once(worker: FakeDecodeWorker) -> object:
        async def step(offset: int) -> None:
            if offset == 3:
                worker.load.predicted_step_s = 5.0
                for age_s in range(5):
                    worker.load.heartbeat_age_s = float(age_s)
                    await asyncio.sleep(0.6)
                worker.load.heartbeat_age_s = worker.load.predicted_step_s = 0.0

        return step

    for worker in decodes:
        worker.on_token = slow_once(worker)  # type: ignore[assignment]
    generation = cluster.generate(max_tokens=6)
    started_s = time.monotonic()
    assert await collect(generation) == expected_tokens(PROMPT, 6)
    # Its stream, too, stands still for longer than the two seconds of a step that nobody predicted.
    assert time.monotonic() - started_s > 2.9
    assert generation.report.num_migrations == 0


async def test_a_gap_in_the_tokens_fails_the_attempt_not_the_request(cluster: FakeCluster) -> None:
    await cluster.add_prefill()
    bad = await cluster.add_decode("decode-0", gap_at=3)
    await cluster.add_decode("decode-1")
    await cluster.start_router()
    for _ in range(4):
        assert await collect(cluster.generate()) == expected_tokens(PROMPT, 5)
    assert bad.requests


async def test_a_request_that_fails_everywhere_ends_after_the_limit(cluster: FakeCluster) -> None:
    prefills = [await cluster.add_prefill(f"prefill-{n}", error="nan") for n in range(2)]
    await cluster.add_decode()
    await cluster.start_router(migration_limit=2)
    with pytest.raises(GenerationFailed, match="nan"):
        await collect(cluster.generate())
    assert sum(len(worker.requests) for worker in prefills) == 3
    assert cluster.metric("relevo_requests_finished_total", finish_reason="error") == 1


async def test_a_stream_that_just_ends_is_a_failure(cluster: FakeCluster) -> None:
    await cluster.add_prefill()
    await cluster.add_decode(end_after=2)
    await cluster.start_router(migration_limit=1)
    generation = cluster.generate()
    assert (await anext(generation)).token_ids[0] == expected_tokens(PROMPT, 1)[0]
    with pytest.raises(GenerationFailed):
        await collect(generation)


async def test_a_prefill_that_ends_without_a_token_is_tried_again(cluster: FakeCluster) -> None:
    await cluster.add_prefill("prefill-0", hide_token=True)
    await cluster.add_prefill("prefill-1")
    await cluster.add_decode()
    await cluster.start_router()
    for _ in range(4):
        assert await collect(cluster.generate()) == expected_tokens(PROMPT, 5)


async def test_a_refusal_is_picked_again(cluster: FakeCluster) -> None:
    prefill = await cluster.add_prefill(num_refusals=1)
    decode = await cluster.add_decode(num_refusals=1)
    await cluster.start_router()
    generation = cluster.generate()
    assert await collect(generation) == expected_tokens(PROMPT, 5)
    assert generation.report.num_migrations == 0
    assert prefill.num_refusals == decode.num_refusals == 0


async def test_a_stale_pick_is_picked_again_and_not_counted(cluster: FakeCluster) -> None:
    prefill = await cluster.add_prefill(num_stale=4)
    await cluster.add_decode()
    await cluster.start_router(migration_limit=0)
    assert await collect(cluster.generate()) == expected_tokens(PROMPT, 5)
    assert prefill.num_stale == 0


async def test_a_restarted_worker_is_told_apart_from_the_one_before(cluster: FakeCluster) -> None:
    prefill, decode = await cluster.add_prefill(), await cluster.add_decode()
    await cluster.start_router()
    assert await collect(cluster.generate()) == expected_tokens(PROMPT, 5)
    cluster.forget(prefill)
    await prefill.stop()
    await cluster.until(lambda: cluster.states()["prefill-0"] == "lost")
    again = await cluster.add_prefill()
    await cluster.until(lambda: cluster.router.status()["state"] == "ready")
    assert await collect(cluster.generate()) == expected_tokens(PROMPT, 5)
    assert again.requests[0].prefill_incarnation == again.incarnation != prefill.incarnation
    assert decode.requests[-1].prefill_worker.incarnation == again.incarnation


async def test_a_draining_worker_hands_its_streams_on(cluster: FakeCluster) -> None:
    await cluster.add_prefill()
    drained = await cluster.add_decode("decode-0", migrate_after=4)
    await cluster.add_decode("decode-1")
    await cluster.start_router(migration_limit=0)
    for _ in range(6):
        assert await collect(cluster.generate(max_tokens=9)) == expected_tokens(PROMPT, 9)
    assert drained.requests
    drained.load.state = "draining"
    drained.touch()
    await cluster.until(lambda: cluster.states()["decode-0"] == "draining")
    num_before = len(drained.requests)
    for _ in range(4):
        await collect(cluster.generate())
    assert len(drained.requests) == num_before


async def test_a_lost_transfer_goes_another_way(cluster: FakeCluster) -> None:
    prefills = [await cluster.add_prefill(f"prefill-{n}") for n in range(2)]
    decode = await cluster.add_decode()
    await cluster.start_router()
    losses = 1

    async def lose(offset: int) -> None:
        nonlocal losses
        if losses:
            losses -= 1
            raise TransferLostError("the link broke")

    decode.on_token = lose
    assert await collect(cluster.generate()) == expected_tokens(PROMPT, 5)
    assert [len(worker.requests) for worker in prefills] == [1, 1]
    # The first prefill may have ended before its cancel came: its KV is given back by name.
    await cluster.until(lambda: any(worker.released for worker in prefills))
    [kept_by] = [worker for worker in prefills if worker.released]
    assert kept_by.released == [kept_by.requests[0].transfer_id]


async def test_an_invalid_request_is_not_retried(cluster: FakeCluster) -> None:
    prefill = await cluster.add_prefill()
    await cluster.add_decode()
    await cluster.start_router()

    async def refuse() -> None:
        raise InvalidRequestError("token id 70000 is out of range")

    prefill.on_request = refuse
    with pytest.raises(InvalidRequest, match="70000"):
        await collect(cluster.generate())
    assert len(prefill.requests) == 1


async def test_a_prompt_that_fits_nowhere_is_refused_before_any_call(cluster: FakeCluster) -> None:
    prefill = await cluster.add_prefill()
    await cluster.add_decode(num_kv_blocks=8)
    await cluster.start_router()
    with pytest.raises(NeverFits):
        await collect(cluster.generate(list(range(100))))
    assert not prefill.requests
    assert cluster.metric("relevo_admission_rejected_total", reason="never_fits") == 1
