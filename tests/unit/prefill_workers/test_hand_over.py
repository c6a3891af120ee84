"""A prompt's way through a prefill worker, with a fake engine and a fake sender."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from engine.engine_thread import EngineFailedError
from engine.request import FinishReason, Request, RequestOutput
from engine.sampling.params import SamplingParams
from kv_transfer.control import Commit, WorkerRef
from kv_transfer.moved_range import MovedRange
from kv_transfer.sender_state import SenderOrder
from prefill_workers.hand_over import HandOver, PrefillOrder, Starts
from rpc.admission import Admission
from rpc.errors import (
    AdmissionRefusedError,
    RequestFailedError,
    TransferLostError,
    WorkerUnavailableError,
)
from tests.fake_engine_loop import FakeEngineLoop


class FakeSender:
    """Notes every call; lets go of a transfer when it is cancelled."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []
        self.on_release: Callable[[Sequence[int]], None] = lambda in_flight: None

    def open(
        self,
        order: SenderOrder,
        on_release: Callable[[Sequence[int]], None],
        on_sent: Callable[[MovedRange], None],
    ) -> None:
        self.calls.append(("open", order.transfer_id))
        self.on_release = on_release

    def offer(self, transfer_id: int, num_tokens: int, block_ids: list[int]) -> None:
        self.calls.append(("offer", (num_tokens, tuple(block_ids))))

    def commit(self, transfer_id: int, commit: Commit) -> None:
        self.calls.append(("commit", commit))

    def cancel(self, transfer_id: int) -> None:
        self.calls.append(("cancel", transfer_id))
        self.on_release(())

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


class Bench:
    """A hand-over between fakes."""

    def __init__(self, *, max_waiting: int = 4) -> None:
        self.engine_loop = FakeEngineLoop()
        self.sender = FakeSender()
        self.admission = Admission(
            incarnation=7, max_waiting=max_waiting, retry_after_s=lambda: 0.5
        )
        self.admission.open()
        self.starts = Starts()
        self.hand_over = HandOver(
            engine_loop=self.engine_loop,
            starts=self.starts,
            sender=self.sender,
            admission=self.admission,
            worker_id="prefill-0",
        )

    def prefill(self, *, transfer_id: int = 1) -> "asyncio.Task[list[RequestOutput]]":
        request = Request(
            request_id="a",
            token_ids=list(range(10)),
            num_prompt_tokens=10,
            sampling_params=SamplingParams(max_tokens=4),
            hand_over=True,
        )
        order = PrefillOrder(
            request=request,
            transfer_id=transfer_id,
            epoch=1,
            decode_worker=WorkerRef("decode-0", 3),
            prefill_incarnation=7,
            hold_s=60.0,
        )

        async def collect() -> list[RequestOutput]:
            return [output async for output in self.hand_over.prefill(order)]

        return asyncio.create_task(collect())

    def start(self, *, num_cached_tokens: int = 0) -> None:
        """The engine is about to run the request for the first time."""
        request = self.engine_loop.requests[self.engine_loop.only_id]
        request.block_ids = [4, 5]
        request.num_computed_tokens = num_cached_tokens
        self.starts.on_start(request)

    def step(self, **facts: object) -> None:
        """One engine step."""
        self.engine_loop.deliver(self.engine_loop.only_id, **facts)


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_cached_prefix_is_offered_before_the_first_step_ends() -> None:
    bench = Bench()
    running = bench.prefill()
    await turns()
    assert bench.sender.names() == ["open"]
    bench.start(num_cached_tokens=4)
    await turns()
    assert bench.sender.calls[1:] == [("offer", (4, (4, 5)))]
    bench.step(num_computed_tokens=10, token_ids=(42,))
    await running
    assert bench.sender.names() == ["open", "offer", "offer", "commit"]


async def test_each_chunk_is_offered_and_the_last_committed() -> None:
    bench = Bench()
    running = bench.prefill()
    await turns()
    bench.start()
    await turns()
    bench.step(num_computed_tokens=6)
    await turns()
    bench.step(num_computed_tokens=10, token_ids=(42,))
    outputs = await running
    assert [each.num_computed_tokens for each in outputs] == [6, 10]
    assert bench.sender.names() == ["open", "offer", "offer", "offer", "commit"]
    assert bench.sender.calls[1:3] == [("offer", (0, (4, 5))), ("offer", (6, (4, 5)))]
    commit = bench.sender.calls[-1][1]
    assert (commit.num_tokens, commit.choices[0].token_id) == (10, 42)
    assert not bench.engine_loop.aborted  # the blocks stay held

    bench.sender.on_release(())
    assert len(bench.engine_loop.aborted) == 1


async def test_a_request_that_ends_with_its_first_token_says_so_in_the_commit() -> None:
    bench = Bench()
    running = bench.prefill()
    await turns()
    bench.step(num_computed_tokens=10, token_ids=(2,), finish_reason=FinishReason.STOP)
    await running
    assert bench.sender.calls[-1][1].choices[0].finish_reason == "stop"


async def test_a_cancel_gives_the_transfer_up() -> None:
    bench = Bench()
    running = bench.prefill()
    await turns()
    bench.step(num_computed_tokens=6)
    await turns()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert bench.sender.names()[-1] == "cancel"
    assert bench.engine_loop.aborted == [bench.engine_loop.only_id]
    assert bench.admission.num_legs == 0


async def test_a_transfer_released_while_it_is_computed_is_lost() -> None:
    bench = Bench()
    running = bench.prefill()
    await turns()
    bench.sender.on_release(())
    with pytest.raises(TransferLostError):
        await running


async def test_a_transfer_released_before_the_engine_knew_the_request_leaves_nothing() -> None:
    bench = Bench()
    bench.engine_loop.on_submit = lambda request_id: bench.engine_loop.aborted.clear()
    opened = bench.sender.open

    def open_and_release(
        order: SenderOrder,
        on_release: Callable[[Sequence[int]], None],
        on_sent: Callable[[MovedRange], None],
    ) -> None:
        opened(order, on_release, on_sent)
        on_release(())

    bench.sender.open = open_and_release
    with pytest.raises(TransferLostError):
        await bench.prefill()
    assert bench.engine_loop.only_id in bench.engine_loop.aborted


async def test_a_failed_request_fails_its_stream_and_a_failed_engine_its_worker() -> None:
    for failure, expected in (
        (None, RequestFailedError),
        (RuntimeError("broken"), WorkerUnavailableError),
    ):
        bench = Bench()
        running = bench.prefill()
        await turns()
        bench.engine_loop.failure = failure
        bench.step(finish_reason=FinishReason.ERROR, error="ValueError: no")
        with pytest.raises(expected):
            await running
        assert "cancel" in bench.sender.names()


async def test_an_engine_that_ended_makes_the_worker_unavailable() -> None:
    bench = Bench()
    bench.engine_loop.submit_error = EngineFailedError("gave up")
    with pytest.raises(WorkerUnavailableError):
        await bench.prefill()


async def test_a_drain_migrates_what_is_not_computed() -> None:
    bench = Bench()
    running = bench.prefill()
    await turns()
    await bench.admission.drain(5.05)
    (output,) = await running
    assert output.finish_reason is FinishReason.MIGRATE
    assert bench.sender.names() == ["open", "cancel"]


async def test_attempts_of_one_request_have_different_ids_in_the_engine() -> None:
    bench = Bench()
    first, second = bench.prefill(transfer_id=1), bench.prefill(transfer_id=2)
    await turns()
    assert len(bench.engine_loop.requests) == 2
    for running in (first, second):
        running.cancel()
    await asyncio.gather(first, second, return_exceptions=True)


async def test_a_full_worker_opens_no_transfer() -> None:
    bench = Bench(max_waiting=1)
    first = bench.prefill()
    await turns()
    with pytest.raises(AdmissionRefusedError):
        await bench.prefill(transfer_id=2)
    assert bench.sender.names() == ["open"]
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
