"""Server-sent events: bytes of one event, and the response that sends them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import orjson
from starlette.types import Send

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
CONTENT_TYPE = b"text/event-stream; charset=utf-8"

RawHeaders = list[tuple[bytes, bytes]]

_HEADERS = (
    (b"content-type", CONTENT_TYPE),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx keeps tokens back
)

# Some clients take these for ends of lines; inside JSON they can only stand in a string.
_LINE_SEPARATORS = (
    ("\u0085".encode(), rb"\u0085"),
    ("\u2028".encode(), rb"\u2028"),
    ("\u2029".encode(), rb"\u2029"),
)


def event(value: object, *, name: str = "") -> bytes:
    """Return one `data:` event, with an `event:` line before it where it has a name."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + _json(value) + b"\n\n"


def _json(value: object) -> bytes:
    data = orjson.dumps(value)
    if not data.isascii():
        for separator, escaped in _LINE_SEPARATORS:
            data = data.replace(separator, escaped)
    return data


class EventMold:
    """An event of which one text changes: written once, and cut where that text stands."""

    _HOLE = "\0text\0"

    def __init__(self, value_of: Callable[[str], object]) -> None:
        self._head, self._tail = event(value_of(self._HOLE)).split(_json(self._HOLE))

    def fill(self, text: str) -> bytes:
        """Return the same as `event` would."""
        return self._head + _json(text) + self._tail


class EventSender:
    """Owns the response of one stream. Invariant: headers first, once; then events; one end."""

    def __init__(
        self, send: Send, headers: Callable[[], RawHeaders], *, keep_alive_s: float
    ) -> None:
        self._send = send
        self._headers = headers
        self._keep_alive_s = keep_alive_s
        self._starting = asyncio.Lock()
        self._has_sent = False
        self.is_started = False

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Send a comment after each quiet interval, since proxies close silent connections."""
        task = asyncio.create_task(self._keep_alive()) if self._keep_alive_s > 0 else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()

    async def write(self, data: bytes) -> None:
        """Send whole events; an error before the first leaves the response unstarted."""
        if not data:
            return
        self._has_sent = True
        if not self.is_started:
            await self._start()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """Close."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self) -> None:
        async with self._starting:
            if self.is_started:
                return
            await self._send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [*_HEADERS, *self._headers()],
                }
            )
            self.is_started = True

    async def _keep_alive(self) -> None:
        while True:
            self._has_sent = False
            await asyncio.sleep(self._keep_alive_s)
            if not self._has_sent:
                await self.write(KEEP_ALIVE)
