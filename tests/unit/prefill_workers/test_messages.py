"""What travels between the pools keeps its meaning, in both directions."""

import asyncio

import grpc
import pytest
from relevo.v1 import common_pb2, prefill_pb2

from decode_workers.link_channel import DialedLinkChannel
from kv_transfer.control import (
    ControlClosedError,
    LinkAccepted,
    LinkAlive,
    LinkIncompatible,
    LinkMessage,
    LinkOpen,
    LinkReady,
    StoreEntry,
    WorkerRef,
)
from kv_transfer.layout import KVLayout
from kv_transfer.link_end import LinkEnd
from prefill_workers.link_channel import AcceptedLinkChannel

LAYOUT = KVLayout(
    model_id="tiny",
    model_revision="1",
    dtype="float64",
    num_layers=2,
    num_kv_heads=2,
    head_dim=16,
    block_size=8,
    hash_scheme="sha256-v1",
)
OPEN = LinkOpen(
    decode_worker=WorkerRef("decode-0", 5),
    generation=3,
    layout=LAYOUT,
    end=LinkEnd(backend="gloo", boot_id="b", network_namespace="4:5", user_id=7),
    prefill_incarnation=7,
)


class Pipe:
    """Both ends of one gRPC stream, with bytes between them."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[object] = asyncio.Queue()
        self.responses: asyncio.Queue[object] = asyncio.Queue()

    def stream_stream(self, *args: object, **kwargs: object):
        return lambda: self

    def __getattr__(self, name: str):
        return self.stream_stream

    # the client's call

    async def read(self) -> object:
        return await self.responses.get()

    async def write(self, request: prefill_pb2.OpenLinkRequest) -> None:
        copy = prefill_pb2.OpenLinkRequest.FromString(request.SerializeToString())
        self.requests.put_nowait(copy)

    def cancel(self) -> None:
        self.requests.put_nowait(grpc.aio.EOF)


class ServerEnd:
    """The servicer's context."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    async def read(self) -> object:
        return await self._pipe.requests.get()

    async def write(self, response: prefill_pb2.OpenLinkResponse) -> None:
        copy = prefill_pb2.OpenLinkResponse.FromString(response.SerializeToString())
        self._pipe.responses.put_nowait(copy)


def make_ends() -> tuple[DialedLinkChannel, AcceptedLinkChannel]:
    pipe = Pipe()
    return DialedLinkChannel(pipe), AcceptedLinkChannel(ServerEnd(pipe))


@pytest.mark.parametrize("message", [OPEN, StoreEntry("key", b"\x00\xff"), LinkAlive()])
async def test_what_the_decode_side_says_arrives(message: LinkMessage) -> None:
    dialed, accepted = make_ends()
    await dialed.send(message)
    assert await accepted.receive() == message


@pytest.mark.parametrize(
    "message",
    [
        LinkAccepted(LAYOUT, "gloo", "because"),
        LinkIncompatible("other model"),
        StoreEntry("key", b""),
        LinkReady(),
        LinkAlive(),
    ],
)
async def test_what_the_prefill_side_says_arrives(message: LinkMessage) -> None:
    dialed, accepted = make_ends()
    await accepted.send(message)
    assert await dialed.receive() == message


async def test_closing_one_end_ends_the_other() -> None:
    dialed, accepted = make_ends()
    await dialed.close()
    for end in (dialed, accepted):
        with pytest.raises(ControlClosedError):
            await end.receive()


async def test_an_empty_message_or_a_senseless_layout_ends_the_stream() -> None:
    pipe = Pipe()
    accepted = AcceptedLinkChannel(ServerEnd(pipe))
    pipe.requests.put_nowait(prefill_pb2.OpenLinkRequest())
    with pytest.raises(ControlClosedError):
        await accepted.receive()
    senseless = prefill_pb2.OpenLinkRequest.Open(layout=common_pb2.KVLayout(dtype="int3"))
    pipe.requests.put_nowait(prefill_pb2.OpenLinkRequest(open=senseless))
    with pytest.raises(ControlClosedError):
        await accepted.receive()
