"""A control plane for these tests: pickles over loopback TCP, one connection per call or stream."""

import asyncio
import pickle
import struct
from collections.abc import AsyncIterator
from contextlib import suppress

from kv_transfer.control import (
    ControlClosedError,
    FetchOrder,
    FetchReply,
    LinkMessage,
    TransferMessage,
    TransferNotFoundError,
    WorkerRef,
)

_HEADER = struct.Struct("!I")
_BROKEN = (ConnectionError, asyncio.IncompleteReadError, OSError)


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, message: object) -> None:
        data = pickle.dumps(message)
        try:
            self.writer.write(_HEADER.pack(len(data)) + data)
            await self.writer.drain()
        except _BROKEN as error:
            raise ControlClosedError(str(error)) from error

    async def receive(self) -> object:
        try:
            (size,) = _HEADER.unpack(await self.reader.readexactly(_HEADER.size))
            return pickle.loads(await self.reader.readexactly(size))  # noqa: S301 - our own child
        except _BROKEN as error:
            raise ControlClosedError(str(error)) from error

    async def close(self) -> None:
        self.writer.close()
        with suppress(*_BROKEN):
            await self.writer.wait_closed()


async def dial(port: int, first: object) -> Connection:
    try:
        connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
    except OSError as error:
        raise ControlClosedError(str(error)) from error
    await connection.send(first)
    return connection


class TcpLinkControl:
    """LinkControl that connects with its first message."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.connection: Connection | None = None
        self.connected = asyncio.Event()

    async def send(self, message: LinkMessage) -> None:
        if self.connection is None:
            self.connection = await dial(self.port, ("link",))
        await self.connection.send(message)

    async def receive(self) -> LinkMessage:
        return await self.connection.receive()

    async def close(self) -> None:
        if self.connection is not None:
            await self.connection.close()


class TcpTransferControl:
    def __init__(self, port: int) -> None:
        self.port = port

    async def watch(
        self, transfer_id: int, *, epoch: int, decode_worker: WorkerRef
    ) -> AsyncIterator[TransferMessage]:
        connection = await dial(self.port, ("watch", transfer_id, epoch, decode_worker))
        try:
            while True:
                message = await connection.receive()
                if isinstance(message, Exception):
                    raise message
                if message is None:
                    return
                yield message
        finally:
            await connection.close()

    async def fetch(self, order: FetchOrder) -> FetchReply:
        return await self.call("fetch", order)

    async def release(self, transfer_id: int, *, epoch: int) -> None:
        await self.call("release", transfer_id, epoch)

    async def call(self, *request: object) -> object:
        connection = await dial(self.port, request)
        try:
            reply = await connection.receive()
        finally:
            await connection.close()
        if isinstance(reply, Exception):
            raise reply
        return reply


__all__ = ["Connection", "TcpLinkControl", "TcpTransferControl", "TransferNotFoundError", "dial"]
