"""Server-sent events: bytes of one event, and the response that sends them."""

import asyncio
from collections.abc import AsyncIterator

import orjson
from starlette.types import Send

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
CONTENT_TYPE = b"text/event-stream; charset=utf-8"

# Some clients take these for ends of lines; inside JSON they can only stand in a string.
_LINE_SEPARATORS = (
    ("\u0085".encode(), rb"\u0085"),
    ("\u2028".encode(), rb"\u2028"),
    ("\u2029".encode(), rb"\u2029"),
)


def event(value: object, *, name: str = "") -> bytes:
    """Return one `data:` event, with an `event:` line before it where it has a name."""
    data = orjson.dumps(value)
    if not data.isascii():
        for separator, escaped in _LINE_SEPARATORS:
            data = data.replace(separator, escaped)
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + data + b"\n\n"


class EventSender:
    """Owns the response of one stream. Invariant: headers first, once; then events; one end."""

    def __init__(self, send: Send, *, keep_alive_s: float) -> None:
        self._send = send
        self._keep_alive_s = keep_alive_s
        self._lock = asyncio.Lock()
        self._has_sent = False
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_started = False

    async def send_all(self, events: AsyncIterator[bytes]) -> None:
        """Send all events; an error before the first one leaves the response unstarted."""
        keep_alive = asyncio.create_task(self._keep_alive()) if self._keep_alive_s > 0 else None
        try:
            async for data in events:
                await self._write(data)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if keep_alive is not None:
                keep_alive.cancel()

    async def fail(self, data: bytes) -> None:
        """Send a last event, an error, and close."""
        await self._write(data)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, data: bytes) -> None:
        async with self._lock:
            self._has_sent = True
            if not self.is_started:
                self.is_started = True
                await self._send(
                    {"type": "http.response.start", "status": 200, "headers": self._all_headers()}
                )
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def _all_headers(self) -> list[tuple[bytes, bytes]]:
        return [
            (b"content-type", CONTENT_TYPE),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # or nginx keeps tokens back
            *self.headers,
        ]

    async def _keep_alive(self) -> None:
        """Send a comment after each quiet interval, since proxies close silent connections."""
        while True:
            self._has_sent = False
            await asyncio.sleep(self._keep_alive_s)
            if not self._has_sent:
                await self._write(KEEP_ALIVE)
