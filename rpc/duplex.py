"""One end of a bidirectional gRPC stream; a receive that is cancelled loses no message."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import grpc

ReceivedT = TypeVar("ReceivedT")
SentT = TypeVar("SentT")


class StreamClosedError(Exception):
    """The stream ended, on either side."""


class Duplex(Generic[ReceivedT, SentT]):
    """Owns the reading side of a stream in a task: a cancelled gRPC read would lose its message.

    Invariant: after `close()` or the peer's end, `receive` returns what had arrived and then
    raises for good.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[Any]],  # a message, or grpc.aio.EOF
        write: Callable[[SentT], Awaitable[None]],
        *,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        self._read = read
        self._write = write
        self._on_close = on_close
        self._received: asyncio.Queue[ReceivedT | None] = asyncio.Queue()
        self._send_lock = asyncio.Lock()
        self._is_closed = False
        self._pump = asyncio.ensure_future(self._pump_messages())

    async def send(self, message: SentT) -> None:
        """Send one message; StreamClosedError when the stream has ended."""
        async with self._send_lock:
            if self._is_closed:
                raise StreamClosedError
            try:
                await self._write(message)
            except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
                raise StreamClosedError(str(error)) from error

    async def receive(self) -> ReceivedT:
        """Return the peer's next message; StreamClosedError when the stream has ended."""
        message = await self._received.get()
        if message is None:
            self._received.put_nowait(None)  # every later call ends the same way
            raise StreamClosedError
        return message

    async def close(self) -> None:
        """End this side; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._pump.cancel()
        self._on_close()
        self._received.put_nowait(None)

    async def _pump_messages(self) -> None:
        try:
            while (message := await self._read()) is not grpc.aio.EOF:
                self._received.put_nowait(message)
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            return  # how a stream ended does not matter to the link above it
        finally:
            self._received.put_nowait(None)
