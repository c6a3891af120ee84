"""The engine's thread: asleep when idle, alive when things fail."""

import asyncio
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from engine import engine_thread
from engine.engine import Engine
from engine.engine_loop import EngineLoop
from engine.engine_thread import EngineFailedError, EngineStoppedError
from engine.load import StepOutput
from engine.request import FinishReason, RequestOutput
from engine.request_stream import RequestStream
from tests.busy_core import busy_core
from tests.unit.engine.conftest import generate, make_request, random_prompt

PROMPT = random_prompt(20)
LONG = 10_000


@pytest.fixture
async def loop(make_engine: Callable[..., Engine]) -> AsyncIterator[EngineLoop]:
    engine_loop = EngineLoop(make_engine(num_kv_blocks=16))
    engine_loop.start()
    yield engine_loop
    if engine_loop.failure is None:
        await engine_loop.call(lambda engine: engine.check_integrity())
    await engine_loop.stop()


async def collect(stream: RequestStream) -> list[RequestOutput]:
    return [output async for output in stream]


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not is_true():  # noqa: ASYNC110 - tests look from outside
            await asyncio.sleep(0.005)


async def num_blocks_in_use(loop: EngineLoop) -> int:
    counts = await loop.call(lambda engine: engine.block_counts())
    return counts.used + counts.held


async def test_streams_carry_every_token_to_its_own_consumer(
    loop: EngineLoop, make_engine: Callable[..., Engine]
):
    prompts = {f"r-{n}": random_prompt(5 + n) for n in range(3)}
    streams = [await loop.submit(make_request(name, p)) for name, p in prompts.items()]
    outputs = await asyncio.gather(*map(collect, streams))
    solo = make_engine()
    for (name, prompt), got in zip(prompts.items(), outputs, strict=True):
        assert tokens_of(got) == generate(solo, make_request(name, prompt))
        assert got[-1].finish_reason is FinishReason.LENGTH
    assert await num_blocks_in_use(loop) == 0


async def least_cpu_s(window_s: float) -> float:
    """Of this process in the quietest of a few windows: who polls is busy in each of them."""
    used_s = []
    for _ in range(3):
        before_s = time.process_time()
        await asyncio.sleep(window_s)
        used_s.append(time.process_time() - before_s)
        if used_s[-1] < 0.01 * window_s:
            break
    return min(used_s)


async def test_an_idle_loop_uses_no_cpu(loop: EngineLoop):
    await collect(await loop.submit(make_request("r", PROMPT)))
    await until(lambda: loop.heartbeat().is_idle)
    assert await least_cpu_s(0.5) < 0.01 * 0.5
    assert loop.heartbeat().is_idle
    assert loop.heartbeat().age_s == 0.0


async def test_a_blocked_request_uses_no_cpu_either(loop: EngineLoop):
    first = await loop.submit(make_request("held", random_prompt(100), hand_over=True))
    await anext(aiter(first))
    stream = await loop.submit(make_request("blocked", random_prompt(60, seed=5), max_tokens=1))
    assert await least_cpu_s(0.5) < 0.01 * 0.5
    await loop.call(lambda engine: engine.release("held"))
    assert len(tokens_of(await collect(stream))) == 1


async def test_one_step_is_one_call_into_the_event_loop(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
):
    steps: list[StepOutput] = []
    loop._thread._on_step = steps.append
    calls = 0
    running = asyncio.get_running_loop()
    call_soon_threadsafe = running.call_soon_threadsafe

    def count(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return call_soon_threadsafe(*arguments, **options)

    monkeypatch.setattr(running, "call_soon_threadsafe", count)
    streams = [
        await loop.submit(make_request(f"r-{n}", PROMPT, max_tokens=LONG // 100)) for n in range(3)
    ]
    await asyncio.gather(*map(collect, streams))
    assert calls <= len(steps) + len(streams)  # a verb is answered before the step
    assert any(len(step.outputs) == 3 for step in steps)


async def test_a_verb_runs_on_the_engine_thread_and_its_error_comes_back(loop: EngineLoop):
    name = await loop.call(lambda _: threading.current_thread().name)
    assert name == "engine"
    with pytest.raises(ValueError, match="reserved"):
        await loop.call(lambda engine: engine.activate("nobody", {0: 1}))


async def test_a_request_that_can_never_fit_is_refused_and_leaves_no_stream(loop: EngineLoop):
    for _ in range(2):
        with pytest.raises(ValueError, match="fewer than"):
            await loop.submit(make_request("r", random_prompt(1000)))
    with pytest.raises(ValueError, match="fewer than"):
        await loop.reserve(make_request("r", random_prompt(1000)))


async def test_abort_while_running_ends_the_stream(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
):
    # The first token, and then not too many.
    may_step, step = threading.Semaphore(5), loop._engine.step

    def step_when_it_may(on_start: Any) -> StepOutput:
        assert may_step.acquire(timeout=30.0)
        return step(on_start)

    monkeypatch.setattr(loop._engine, "step", step_when_it_may)
    stream = await loop.submit(make_request("r", random_prompt(4), max_tokens=LONG))
    await anext(aiter(stream))
    loop.abort("r")
    loop.abort("r")
    loop.abort("unknown")
    may_step.release(100)
    outputs = await collect(stream)
    assert outputs[-1].finish_reason is FinishReason.ABORT
    assert await num_blocks_in_use(loop) == 0


async def test_abort_before_anything_ran_ends_the_stream(loop: EngineLoop):
    streams = [await loop.submit(make_request(f"r-{n}", PROMPT, max_tokens=50)) for n in range(12)]
    loop.abort("r-11")
    ends = [(await collect(stream))[-1].finish_reason for stream in streams]
    assert ends[-1] is FinishReason.ABORT
    assert set(ends[:-1]) == {FinishReason.LENGTH}


async def test_a_cancelled_submit_leaves_nothing(loop: EngineLoop):
    task = asyncio.create_task(loop.submit(make_request("r", PROMPT, max_tokens=LONG)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await loop.call(lambda _: None)
    assert await num_blocks_in_use(loop) == 0
    assert (await loop.call(lambda engine: engine.load())).num_running == 0


async def test_reservations_are_first_come_first_served(loop: EngineLoop):
    first = await loop.reserve(make_request("a", random_prompt(100)))
    assert len(first.block_ids) == 13
    granted: list[str] = []

    async def reserve(name: str, length: int) -> None:
        await loop.reserve(make_request(name, random_prompt(length)))
        granted.append(name)

    big = asyncio.create_task(reserve("big", 60))
    await asyncio.sleep(0.02)
    small = asyncio.create_task(reserve("small", 8))  # there is room, but it came later
    await asyncio.sleep(0.05)
    assert granted == []
    await loop.call(lambda engine: engine.release("a"))
    await asyncio.gather(big, small)
    assert granted == ["big", "small"]
    for name in granted:
        loop.abort(name)
    assert await num_blocks_in_use(loop) == 0


async def test_a_cancelled_reservation_makes_room_for_the_next(loop: EngineLoop):
    await loop.reserve(make_request("a", random_prompt(100)))
    big = asyncio.create_task(loop.reserve(make_request("big", random_prompt(60))))
    await asyncio.sleep(0.02)
    small = asyncio.create_task(loop.reserve(make_request("small", random_prompt(8))))
    await asyncio.sleep(0.02)
    big.cancel()
    assert len((await small).block_ids) == 2
    loop.abort("a")
    loop.abort("small")
    assert await num_blocks_in_use(loop) == 0


async def test_a_reservation_cancelled_while_it_is_granted_does_not_leak(loop: EngineLoop):
    for number in range(50):
        task = asyncio.create_task(loop.reserve(make_request(f"r-{number}", PROMPT)))
        await asyncio.sleep(0.0001 * (number % 7))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        loop.abort(f"r-{number}")
    assert await num_blocks_in_use(loop) == 0


async def test_a_reserved_request_runs_once_activated(loop: EngineLoop):
    await loop.reserve(make_request("r", PROMPT))
    stream = loop.open_stream("r")
    assert await loop.call(lambda engine: engine.activate("r", {0: 5})) == []
    outputs = await collect(stream)
    assert outputs[0].start_position == 21
    assert len(tokens_of(outputs)) == 11


async def test_a_last_token_ends_the_stream_of_an_activated_request(loop: EngineLoop):
    await loop.reserve(make_request("r", PROMPT, max_tokens=1))
    stream = loop.open_stream("r")
    (output,) = await loop.call(lambda engine: engine.activate("r", {0: 5}))
    assert await collect(stream) == [output]


async def test_a_failing_forward_fails_its_requests_and_serving_goes_on(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
):
    runner = loop._engine._runner
    forward = runner.forward

    def fail(batch: Any) -> Any:
        raise RuntimeError("boom")

    for number in range(4):  # one less than what ends it
        monkeypatch.setattr(runner, "forward", fail)
        outputs = await collect(await loop.submit(make_request(f"bad-{number}", PROMPT)))
        assert outputs[-1].finish_reason is FinishReason.ERROR
        assert "boom" in (outputs[-1].error or "")
    monkeypatch.setattr(runner, "forward", forward)
    outputs = await collect(await loop.submit(make_request("good", PROMPT)))
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert loop.failure is None


async def test_failing_again_and_again_ends_the_engine_and_every_stream(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
):
    def fail(batch: Any) -> Any:
        raise RuntimeError("boom")

    monkeypatch.setattr(loop._engine._runner, "forward", fail)
    await loop.reserve(make_request("reserved", PROMPT))
    bystander = loop.open_stream("reserved")
    late = make_request("late", random_prompt(110), priority=1)
    waiting = asyncio.create_task(loop.reserve(late))
    for number in range(5):
        await collect(await loop.submit(make_request(f"bad-{number}", PROMPT)))
    outputs = await collect(bystander)
    assert outputs[-1].finish_reason is FinishReason.ERROR
    with pytest.raises(EngineFailedError):
        await waiting
    assert isinstance(loop.failure, EngineFailedError)
    with pytest.raises(EngineFailedError):
        await loop.call(lambda _: None)
    with pytest.raises(EngineFailedError):
        await loop.submit(make_request("r", PROMPT))
    loop.abort("reserved")


async def test_a_broken_engine_answers_the_verbs_of_its_last_turn(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
):
    def break_down(on_start: object) -> StepOutput:
        raise AssertionError("the books do not agree")

    told: list[BaseException | None] = []
    loop._on_failure = lambda: told.append(loop.failure)
    monkeypatch.setattr(loop._engine, "step", break_down)
    stream = await loop.submit(make_request("r", PROMPT))
    assert (await collect(stream))[-1].finish_reason is FinishReason.ERROR
    assert isinstance(loop.failure, AssertionError)
    assert told == [loop.failure]


async def test_a_start_is_told_once_and_before_the_first_output(
    make_engine: Callable[..., Engine],
):
    told: list[tuple[str, int]] = []
    loop = EngineLoop(
        make_engine(),
        on_start=lambda request: told.append((request.request_id, len(request.block_ids))),
    )
    loop.start()
    async for _ in await loop.submit(make_request("r", PROMPT)):
        assert [name for name, _ in told] == ["r"]
    assert told[0][1] > 0, "it has its blocks by then"
    await loop.stop()


async def test_the_last_that_is_told_before_a_rest_is_how_things_stand(
    make_engine: Callable[..., Engine],
):
    told: list[int] = []
    loop = EngineLoop(make_engine(), on_step=lambda step: told.append(step.stats.num_tokens))
    loop.start()
    await collect(await loop.submit(make_request("r", PROMPT, max_tokens=3)))
    async with asyncio.timeout(5.0):
        while told[-1]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert told.count(0) == 1
    await loop.stop()


async def test_an_observer_that_raises_harms_nobody(make_engine: Callable[..., Engine]):
    def observe(step: object) -> None:
        raise RuntimeError("observer")

    loop = EngineLoop(make_engine(), on_step=observe, on_start=observe)
    loop.start()
    outputs = await collect(await loop.submit(make_request("r", PROMPT)))
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    await loop.stop()


async def test_the_heartbeat_ages_while_a_step_hangs(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
):
    hang = threading.Event()
    step = loop._engine.step

    def hanging_step(on_start: object) -> StepOutput:
        hang.wait(30.0)
        return step()

    monkeypatch.setattr(loop._engine, "step", hanging_step)
    stream = await loop.submit(make_request("r", PROMPT, max_tokens=1))
    await until(lambda: age_but_for_others_s(loop) >= 0.1)
    assert not loop.heartbeat().is_idle
    hang.set()
    await collect(stream)


def age_but_for_others_s(loop: EngineLoop) -> float:
    heartbeat = loop.heartbeat()
    return heartbeat.age_s - heartbeat.waited_s


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how long a thread waits")
async def test_the_heartbeat_says_how_long_the_engine_waited_for_a_core(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
):
    step, may_end = loop._engine.step, threading.Event()

    def turning_step(on_start: object) -> StepOutput:
        os.sched_setaffinity(0, {core})  # of this thread alone
        while not may_end.is_set():
            pass
        return step()

    monkeypatch.setattr(loop._engine, "step", turning_step)
    with busy_core() as core:
        stream = await loop.submit(make_request("r", PROMPT, max_tokens=1))
        await until(lambda: loop.heartbeat().waited_s >= 0.1)
        may_end.set()
    await collect(stream)
    await until(lambda: loop.heartbeat().waited_s == 0.0)  # idle again


async def test_stop_ends_open_streams_and_refuses_more(make_engine: Callable[..., Engine]):
    loop = EngineLoop(make_engine(num_kv_blocks=512))
    loop.start()
    stream = await loop.submit(make_request("r", PROMPT, max_tokens=LONG))
    await anext(aiter(stream))
    await loop.stop()
    assert (await collect(stream))[-1].finish_reason is FinishReason.ABORT
    with pytest.raises(EngineStoppedError):
        await loop.call(lambda _: None)
    with pytest.raises(EngineStoppedError):
        await loop.reserve(make_request("s", PROMPT))
    loop.abort("r")
    await loop.stop()
    assert loop.failure is None


async def test_a_row_that_fails_to_sample_fails_alone(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
):
    def fault_point(point: str, *, request_label: Any) -> None:
        if point == "sample" and request_label == "bad":
            raise RuntimeError("one row")

    monkeypatch.setattr("engine.step.fault_point", fault_point)
    streams = [
        await loop.submit(make_request(name, PROMPT, request_label=name))
        for name in ("good", "bad", "fine")
    ]
    ends = [(await collect(stream))[-1] for stream in streams]
    assert [end.finish_reason for end in ends] == [
        FinishReason.LENGTH,
        FinishReason.ERROR,
        FinishReason.LENGTH,
    ]
    assert "one row" in (ends[1].error or "")


async def test_fault_points_are_visited_with_the_labels_of_the_batch(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
):
    visits: list[tuple[str, Any]] = []

    def fault_point(point: str, **context: Any) -> None:
        visits.append((point, context.get("request_label")))

    monkeypatch.setattr("engine.step.fault_point", fault_point)
    monkeypatch.setattr(engine_thread, "fault_point", fault_point)
    await collect(await loop.submit(make_request("r", PROMPT, max_tokens=2, request_label="x")))
    assert [visit for visit in visits if visit[0] != "engine_heartbeat"] == [
        ("prefill_step", frozenset({"x"})),
        ("sample", "x"),
        ("decode_step", frozenset({"x"})),
        ("sample", "x"),
    ]
    assert ("engine_heartbeat", None) in visits
