"""A loopback TCP proxy between clients and an ingress, that fails as networks do."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class TcpProxy:
    """Passes bytes both ways. Its fields may be changed while it runs."""

    target_port: int
    chunk_bytes: int = 65536  # read at once
    pause_s: float = 0.0  # after each chunk, either way: 1 byte and a pause is a dribble
    is_deaf: bool = False  # half open: takes bytes of both sides and passes none on
    port: int = 0
    _pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def num_connections(self) -> int:
        return len(self._pairs)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["TcpProxy"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            self.cut()
            server.close()
            await server.wait_closed()

    def cut(self) -> None:
        """Reset every connection, on both sides."""
        for pair in list(self._pairs):
            for writer in pair:
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        pair = (writer, far_writer)
        self._pairs.add(pair)
        ways = [
            asyncio.create_task(self._pass(reader, far_writer)),
            asyncio.create_task(self._pass(far_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._pairs.discard(pair)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for each in pair:
                each.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(self.chunk_bytes):
                if not self.is_deaf:
                    writer.write(data)
                    await writer.drain()
                if self.pause_s:
                    await asyncio.sleep(self.pause_s)
