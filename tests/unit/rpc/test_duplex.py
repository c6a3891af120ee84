"""A bidirectional stream that survives cancelled reads."""

import asyncio

import grpc
import pytest

from rpc.duplex import Duplex, StreamClosedError


class FakeStream:
    """Hands out what is put into `incoming`."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[object] = asyncio.Queue()
        self.sent: list[str] = []

    async def read(self) -> object:
        message = await self.incoming.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def write(self, message: str) -> None:
        self.sent.append(message)


async def test_a_cancelled_receive_loses_no_message() -> None:
    stream = FakeStream()
    duplex: Duplex[str, str] = Duplex(stream.read, stream.write)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(duplex.receive(), 0.01)
    stream.incoming.put_nowait("one")
    assert await duplex.receive() == "one"


@pytest.mark.parametrize("end", [grpc.aio.EOF, grpc.aio.UsageError("over"), grpc.RpcError()])
async def test_the_end_of_the_stream_is_told_after_its_last_message_and_for_good(
    end: object,
) -> None:
    stream = FakeStream()
    duplex: Duplex[str, str] = Duplex(stream.read, stream.write)
    stream.incoming.put_nowait("last")
    stream.incoming.put_nowait(end)
    assert await duplex.receive() == "last"
    for _ in range(2):
        with pytest.raises(StreamClosedError):
            await duplex.receive()


async def test_closing_ends_both_directions_once() -> None:
    stream = FakeStream()
    closed = []
    duplex: Duplex[str, str] = Duplex(
        stream.read, stream.write, on_close=lambda: closed.append(True)
    )
    waiting = asyncio.create_task(duplex.receive())
    await asyncio.sleep(0)
    await duplex.send("hello")
    await duplex.close()
    await duplex.close()
    with pytest.raises(StreamClosedError):
        await waiting
    with pytest.raises(StreamClosedError):
        await duplex.send("too late")
    assert (stream.sent, closed) == (["hello"], [True])
