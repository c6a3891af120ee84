import asyncio

import pytest

from router import probation as module
from router.probation import PASSED_AFTER_TOKENS, Probation, Turn
from router.request import TokenBatch
from router.retry import Failure
from router.timeline import AttemptRecord
from router.worker_view import WorkerKey
from tests.fake_time import in_fake_time

HERE, THERE = WorkerKey("decode-0", 1), WorkerKey("decode-1", 1)
RECORD = AttemptRecord(prefill_worker_id="", decode_worker_id="", started_at_s=0.0)


def lost(key: WorkerKey = HERE, cause: str = "lost") -> Failure:
    return Failure(cause=cause, message="", was_admitted=True, workers=frozenset({key}))


@in_fake_time
async def test_suspects_go_one_at_a_time_and_others_at_once() -> None:
    probation = Probation()
    order: list[str] = []

    async def run(name: str, *, is_needed: bool) -> None:
        async with probation.turn(is_needed=is_needed) as turn:
            turn.begin([HERE])
            order.append(f"{name} begins")
            await asyncio.sleep(0.01)
            order.append(f"{name} ends")

    await asyncio.gather(
        run("a", is_needed=True), run("b", is_needed=True), run("c", is_needed=False)
    )
    assert order.index("b begins") > order.index("a ends")
    assert order.index("c begins") < order.index("a ends")


@in_fake_time
async def test_what_is_lost_in_a_turn_is_charged_to_its_request_alone() -> None:
    probation, neighbour = Probation(), Turn()
    async with probation.turn(is_needed=True) as turn:
        turn.begin([HERE])
        assert probation.blames_other(lost(), neighbour)
        assert not probation.blames_other(lost(THERE), neighbour)
        assert not probation.blames_other(lost(cause="error"), neighbour)
        assert not probation.blames_other(lost(), turn)
    # Whoever hears of it later hears the same.
    assert probation.blames_other(lost(), neighbour)
    assert probation.blames_other(lost(), Turn())
    assert not probation.blames_other(lost(WorkerKey("decode-0", 2)), neighbour)


@in_fake_time
async def test_a_turn_ends_with_a_few_tokens_and_then_everybody_pays() -> None:
    probation = Probation()
    async with probation.turn(is_needed=True) as first:
        first.begin([HERE])
        delivered: list[TokenBatch] = []
        deliver = first.counted(lambda batch, record: delivered.append(batch))
        for number in range(PASSED_AFTER_TOKENS):
            assert first.workers
            deliver(TokenBatch([number]), RECORD)
        assert len(delivered) == PASSED_AFTER_TOKENS
        assert not probation.blames_other(lost(), Turn())
        async with asyncio.timeout(1.0), probation.turn(is_needed=True) as second:
            second.begin([HERE])
        assert not second.workers


@in_fake_time
async def test_a_turn_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PASSED_AFTER_S", 0.01)
    probation = Probation()
    async with probation.turn(is_needed=True) as first:
        # Not while it waits for workers.
        await asyncio.sleep(0.03)
        waiting = asyncio.create_task(probation.turn(is_needed=True).__aenter__())
        await asyncio.sleep(0)
        assert not waiting.done()
        first.begin([HERE])
        (await waiting).end()


@in_fake_time
async def test_who_gives_up_waiting_holds_nobody_up() -> None:
    probation = Probation()
    async with probation.turn(is_needed=True):
        waiting = asyncio.create_task(probation.turn(is_needed=True).__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(1.0), probation.turn(is_needed=True):
        pass


@in_fake_time
async def test_what_is_remembered_is_bounded() -> None:
    probation = Probation()
    for number in range(module.NUM_LOST_KEPT + 50):
        key = WorkerKey("decode-0", number)
        async with probation.turn(is_needed=True) as turn:
            turn.begin([key])
            probation.blames_other(lost(key), turn)
    assert len(probation._lost) == module.NUM_LOST_KEPT
