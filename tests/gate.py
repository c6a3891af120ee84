"""A loopback TCP proxy in front of one server: it can be cut, frozen and opened again."""

import asyncio
from contextlib import suppress

CHUNK_BYTES = 65_536


class Gate:
    """Forwards both ways while open.

    cut     every connection is reset and new ones end at once, as if the process was killed
    freeze  bytes stay where they are, as if it was stopped or the network gone; `open` lets them on
    """

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._passing = asyncio.Event()
        self._passing.set()
        self._is_cut = False
        self._delay_s = 0.0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Listen; returns the address to dial instead of the server's."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        self._is_cut = True
        for writer in list(self._writers):
            writer.transport.abort()

    def freeze(self) -> None:
        self._passing.clear()

    def slow_down(self, delay_s: float) -> None:
        """Everything that passes is this late from now on."""
        self._delay_s = delay_s

    def open(self) -> None:
        self._is_cut = False
        self._delay_s = 0.0
        self._passing.set()

    async def stop(self) -> None:
        self.open()
        self.cut()
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            there = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        for source, sink in ((reader, there[1]), (there[0], writer)):
            self._writers.add(sink)
            task = asyncio.get_running_loop().create_task(self._forward(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        passing = asyncio.get_running_loop().create_task(self._pass_on(late, sink))
        with suppress(OSError):
            while data := await source.read(CHUNK_BYTES):
                late.put_nowait((asyncio.get_running_loop().time() + self._delay_s, data))
        late.put_nowait((0.0, b""))
        try:
            await passing
        finally:
            passing.cancel()
            self._writers.discard(sink)
            sink.close()

    async def _pass_on(
        self, late: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while True:
                due_s, data = await late.get()
                if not data:
                    return
                await asyncio.sleep(due_s - asyncio.get_running_loop().time())
                await self._passing.wait()
                sink.write(data)
                await sink.drain()
