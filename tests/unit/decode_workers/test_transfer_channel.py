"""The decode side's calls about KV, against a fake stub."""

from collections.abc import AsyncIterator

import grpc
import pytest
from relevo.v1 import common_pb2, prefill_pb2

from decode_workers.transfer_channel import TransferChannel
from kv_transfer.control import (
    Commit,
    CommitChoice,
    ControlClosedError,
    FetchOrder,
    FetchVerdict,
    Offer,
    TransferNotFoundError,
    WorkerRef,
)

ORDER = FetchOrder(
    transfer_id=1,
    epoch=2,
    decode_worker=WorkerRef("decode-0", 3),
    generation=4,
    ticket=5,
    token_start=6,
    token_end=7,
    with_digest=True,
)


def rpc_error(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="why")


class FakeCall:
    """A stream of messages that ends or breaks."""

    def __init__(self, messages: list[object]) -> None:
        self._messages = messages
        self.is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[object]:
        for message in self._messages:
            if isinstance(message, Exception):
                raise message
            yield message

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeChannel:
    """Answers each method with what the test prepared."""

    def __init__(self, **answers: object) -> None:
        self._answers = answers
        self.requests: list[object] = []

    def _callable(self, path: str, *args: object, **kwargs: object):
        name = path.rpartition("/")[2]

        async def unary(request: object, **options: object) -> object:
            self.requests.append(request)
            answer = self._answers[name]
            if isinstance(answer, Exception):
                raise answer
            return answer

        def stream(request: object) -> object:
            self.requests.append(request)
            return self._answers[name]

        return stream if name == "Transfer" else unary

    unary_unary = unary_stream = stream_stream = stream_unary = _callable


def make_channel(**answers: object) -> TransferChannel:
    ends = frozenset({"decode-0", "prefill-0"})
    return TransferChannel(FakeChannel(**answers), ends=ends, timeout_s=1.0)


async def read(channel: TransferChannel) -> list[object]:
    watching = channel.watch(1, epoch=2, decode_worker=WorkerRef("decode-0", 3))
    return [message async for message in watching]


async def test_offers_and_the_commit_arrive_in_order() -> None:
    response = prefill_pb2.TransferResponse
    choice = response.Choice(token_id=9, finish_reason=common_pb2.FINISH_REASON_STOP)
    call = FakeCall(
        [
            response(offer=response.Offer(num_tokens=8)),
            response(commit=response.Commit(num_tokens=10, choices=[choice])),
        ]
    )
    assert await read(make_channel(Transfer=call)) == [
        Offer(8),
        Commit(num_tokens=10, choices=(CommitChoice(token_id=9, finish_reason="stop"),)),
    ]
    assert call.is_cancelled


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.NOT_FOUND, TransferNotFoundError),
        (grpc.StatusCode.UNAVAILABLE, ControlClosedError),
    ],
)
async def test_how_a_watch_ends_is_told_apart(code: grpc.StatusCode, expected: type) -> None:
    with pytest.raises(expected):
        await read(make_channel(Transfer=FakeCall([rpc_error(code)])))


@pytest.mark.parametrize("verdict", list(FetchVerdict))
async def test_a_fetch_brings_its_verdict(verdict: FetchVerdict) -> None:
    number = prefill_pb2.FetchVerdict.Value(f"FETCH_VERDICT_{verdict.name}")
    reply = prefill_pb2.FetchResponse(verdict=number, digest=b"d")
    answer = await make_channel(Fetch=reply).fetch(ORDER)
    assert (answer.verdict, answer.digest) == (verdict, b"d")


async def test_a_fetch_and_a_release_without_an_answer_raise() -> None:
    channel = make_channel(
        Fetch=rpc_error(grpc.StatusCode.UNAVAILABLE),
        Release=rpc_error(grpc.StatusCode.UNAVAILABLE),
    )
    with pytest.raises(ControlClosedError):
        await channel.fetch(ORDER)
    with pytest.raises(ControlClosedError):
        await channel.release(1, epoch=2)
