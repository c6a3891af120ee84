"""A request's way through a decode worker, with a fake engine and a fake receiver."""

import asyncio
from types import SimpleNamespace

import pytest

from decode_workers.decoding import Admitted, Arrived, DecodeOrder, Decoding
from engine.request import FinishReason, Request
from engine.sampling.params import SamplingParams
from kv_transfer.control import (
    Commit,
    CommitChoice,
    FailureReason,
    TransferFailedError,
    WorkerRef,
)
from kv_transfer.receiver import Received
from rpc.admission import Admission
from rpc.errors import RequestFailedError, TransferLostError, WorkerUnavailableError
from rpc.worker_metrics import WorkerMetrics
from telemetry import metrics
from tests.fake_engine_loop import FakeEngineLoop

NUM_TOKENS = 10


class FakeReceiver:
    """Reserves at once; the test says when and how the reception ends."""

    def __init__(self) -> None:
        self.result: asyncio.Future[Received] = asyncio.get_running_loop().create_future()

    async def receive(self, order, control, reserve, give_back) -> Received:
        await reserve()
        return await self.result


def make_received(*, finish_reason: str = "") -> Received:
    choice = CommitChoice(token_id=42, finish_reason=finish_reason)
    return Received(
        commit=Commit(num_tokens=NUM_TOKENS, choices=(choice,)),
        num_bytes=100,
        transfer_s=0.2,
        tail_s=0.1,
        num_cached_tokens=3,
    )


class Bench:
    """A decoding between fakes."""

    def __init__(self, *, is_linked: bool = True) -> None:
        self.engine_loop = FakeEngineLoop()
        self.receiver = FakeReceiver()
        self.metrics = WorkerMetrics(pool="decode", worker_id="decode-0")
        self.admission = Admission(incarnation=7, max_waiting=4, retry_after_s=lambda: 0.5)
        self.admission.open()
        link = SimpleNamespace(peer=None) if is_linked else None
        self.decoding = Decoding(
            engine_loop=self.engine_loop,
            dialer=SimpleNamespace(link_for=lambda peer_id, incarnation: link),
            receiver=self.receiver,
            admission=self.admission,
            open_control=lambda peer: None,
            worker_metrics=self.metrics,
        )

    def decode(self, *, with_peer: bool = True) -> "asyncio.Task[list[object]]":
        request = Request(
            request_id="a",
            token_ids=list(range(NUM_TOKENS)),
            num_prompt_tokens=NUM_TOKENS,
            sampling_params=SamplingParams(max_tokens=4),
        )
        order = DecodeOrder(
            request=request,
            transfer_id=1,
            epoch=1,
            prefill_worker=WorkerRef("prefill-0", 3) if with_peer else None,
            decode_incarnation=7,
            timeout_s=60.0,
        )

        async def collect() -> list[object]:
            return [message async for message in self.decoding.decode(order)]

        return asyncio.create_task(collect())


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_received_request_streams_the_peers_token_and_then_the_engines() -> None:
    bench = Bench()
    running = bench.decode()
    await turns()
    bench.receiver.result.set_result(make_received())
    await turns()
    assert bench.engine_loop.activated == [(bench.engine_loop.only_id, {0: 42})]
    bench.engine_loop.deliver(
        bench.engine_loop.only_id,
        num_computed_tokens=11,
        token_ids=(7,),
        finish_reason=FinishReason.LENGTH,
    )
    admitted, arrived, first, second = await running
    assert admitted == Admitted()
    assert arrived == Arrived(num_cached_tokens=3, num_bytes=100, transfer_s=0.2, tail_s=0.1)
    assert (first.start_position, first.token_ids) == (NUM_TOKENS, (42,))
    assert (second.start_position, second.token_ids) == (NUM_TOKENS + 1, (7,))
    counts = [
        s for s in bench.metrics.samples() if s.name == f"{metrics.KV_TRANSFER_SECONDS}_count"
    ]
    assert [each.value for each in counts] == [1]


async def test_a_request_that_ended_in_prefill_never_reaches_the_engine() -> None:
    bench = Bench()
    running = bench.decode()
    await turns()
    bench.receiver.result.set_result(make_received(finish_reason="stop"))
    *_, last = await running
    assert last.finish_reason is FinishReason.STOP
    assert not bench.engine_loop.activated
    assert bench.engine_loop.aborted == [bench.engine_loop.only_id]


async def test_without_a_link_the_transfer_is_lost_at_once() -> None:
    with pytest.raises(TransferLostError):
        await Bench(is_linked=False).decode()


async def test_a_failed_transfer_is_lost_and_its_blocks_are_given_up() -> None:
    bench = Bench()
    running = bench.decode()
    await turns()
    bench.receiver.result.set_exception(TransferFailedError(FailureReason.TIMEOUT))
    with pytest.raises(TransferLostError, match="timeout"):
        await running
    assert bench.engine_loop.aborted == [bench.engine_loop.only_id]


@pytest.mark.parametrize("has_arrived", [False, True])
async def test_a_cancel_gives_the_blocks_up_in_any_state(has_arrived: bool) -> None:
    bench = Bench()
    running = bench.decode()
    await turns()
    if has_arrived:
        bench.receiver.result.set_result(make_received())
        await turns()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert bench.engine_loop.aborted == [bench.engine_loop.only_id]
    assert bench.admission.num_legs == 0


@pytest.mark.parametrize("has_arrived", [False, True])
async def test_a_drain_migrates_a_request_in_any_state(has_arrived: bool) -> None:
    bench = Bench()
    running = bench.decode()
    await turns()
    if has_arrived:
        bench.receiver.result.set_result(make_received())
        await turns()
    await bench.admission.drain(5.05)
    *_, last = await running
    assert last.finish_reason is FinishReason.MIGRATE


async def test_a_request_without_a_peer_streams_only_what_has_tokens() -> None:
    bench = Bench()
    running = bench.decode(with_peer=False)
    await turns()
    request_id = bench.engine_loop.only_id
    bench.engine_loop.deliver(request_id, num_computed_tokens=6)
    bench.engine_loop.deliver(
        request_id, num_computed_tokens=10, token_ids=(1,), finish_reason=FinishReason.STOP
    )
    _, only = await running
    assert only.token_ids == (1,)


async def test_a_failed_request_and_an_engine_that_ends_are_told_apart() -> None:
    for finish_reason, failure, expected in (
        (FinishReason.ERROR, None, RequestFailedError),
        (FinishReason.ERROR, RuntimeError("broken"), WorkerUnavailableError),
        (FinishReason.ABORT, None, WorkerUnavailableError),
    ):
        bench = Bench()
        running = bench.decode(with_peer=False)
        await turns()
        bench.engine_loop.failure = failure
        bench.engine_loop.deliver(bench.engine_loop.only_id, finish_reason=finish_reason)
        with pytest.raises(expected):
            await running
