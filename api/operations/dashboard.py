"""The built-in page and its stream of events: one picture a second, for all readers."""

from collections.abc import AsyncIterator
from heapq import nlargest
from importlib.resources import files
from operator import attrgetter
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from api.disconnect import run_while_connected
from api.operations.pulse import Pulse
from api.serving import Serving
from api.sse import EventSender
from telemetry.trace_store import RequestTrace, TraceStore
from telemetry.trace_view import describe_trace

PATH: Final = "/dashboard"
NUM_ROUTES: Final = 12
NUM_SLOW: Final = 6
NUM_EVENTS: Final = 40
# Nothing from elsewhere; the styles and the script are the page's own.
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src"
    " 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "vary": "accept",
}


class Dashboard:
    """Draws the picture. Invariant: however many look, each is drawn once."""

    def __init__(self, serving: Serving, pulse: Pulse, traces: TraceStore, *, version: str) -> None:
        self._serving = serving
        self._pulse = pulse
        self._traces = traces
        self._version = version
        self._page = files("api").joinpath("static/dashboard.html").read_text(encoding="utf-8")
        self._drawn: tuple[int, bytes] = (-1, b"")

    def page(self) -> Response:
        """Return the page."""
        return HTMLResponse(self._page, headers=_HEADERS)

    async def pictures(self) -> AsyncIterator[bytes]:
        """Yield one now and after each tick, as an event."""
        while not self._serving.is_leaving:
            yield self._picture()
            async with self._pulse.ticked:
                await self._pulse.ticked.wait()

    def _picture(self) -> bytes:
        num_ticks, data = self._drawn
        if num_ticks != self._pulse.num_ticks:
            data = b"data: " + orjson.dumps(self.snapshot()) + b"\n\n"
            self._drawn = (self._pulse.num_ticks, data)
        return data

    def snapshot(self) -> dict[str, Any]:
        """Everything the page shows, as plain data."""
        upstream = self._serving.upstream
        return {
            "version": self._version,
            "model": self._serving.model_config.model_id,
            "uptime_s": self._pulse.uptime_s,
            "is_draining": self._serving.is_draining,
            "queued": upstream.num_waiting,
            "running": self._serving.num_running,
            "traffic": self._pulse.traffic.summary(),
            "events": self._pulse.events.newest_first()[:NUM_EVENTS],
            "slow": [describe_trace(each, has_content=False) for each in self._slowest()],
            **upstream.status(NUM_ROUTES),
        }

    def _slowest(self) -> list[RequestTrace]:
        """Of the remembered requests those that took longest, the slowest first."""
        return nlargest(NUM_SLOW, self._traces.recent(), key=attrgetter("duration_ns"))


class DashboardEndpoint:
    """An ASGI endpoint: the page, or to its own script pictures until the reader leaves."""

    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = dashboard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one reader."""
        if "text/event-stream" not in Request(scope).headers.get("accept", ""):
            await self._dashboard.page()(scope, receive, send)
            return
        await run_while_connected(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        sender = EventSender(send, list, keep_alive_s=0.0)
        async for picture in self._dashboard.pictures():
            await sender.write(picture)
        await sender.end()
