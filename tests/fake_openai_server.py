"""An OpenAI-compatible server on a real socket whose every move a test decides."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Json = dict[str, Any]
MODEL = "fake"


@dataclass(kw_only=True)
class FakeOpenAIServer:
    """Streams `max_tokens` tokens, one by one, and remembers who asked what."""

    first_token_s: float = 0.0
    step_s: float = 0.0
    tells_usage: bool = True
    # Called with each body in turn; a status other than 200 refuses it.
    verdict: Callable[[Json], int] = lambda _: 200
    retry_after: str = "0"
    breaks_after: int | None = None  # tokens, then the connection is closed
    workers: list[Json] = field(default_factory=list)
    revision: str = "main"
    bodies: list[Json] = field(default_factory=list)
    headers: list[Json] = field(default_factory=list)
    num_running: int = 0
    most_running: int = 0
    sent_s: list[float] = field(default_factory=list)  # when it began to send each token
    num_left: int = 0  # answers whose client went away
    url: str = ""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        status = self.verdict(body)
        if status != 200:
            error = {"error": {"message": f"refused with {status}", "code": "queue_full"}}
            headers = {"retry-after": self.retry_after}
            return web.json_response(error, status=status, headers=headers)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            if body.get("stream"):
                return await self._stream(request, body)
            await asyncio.sleep(self.first_token_s)
            return web.json_response(self._whole(body))
        except (ConnectionResetError, asyncio.CancelledError):
            self.num_left += 1
            raise
        finally:
            self.num_running -= 1

    async def _stream(self, request: web.Request, body: Json) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        num_tokens = body["max_tokens"]
        is_chat = "messages" in body
        for number in range(num_tokens):
            await asyncio.sleep(self.first_token_s if number == 0 else self.step_s)
            if number == self.breaks_after:
                assert request.transport is not None
                request.transport.abort()
                return response
            end = "length" if number == num_tokens - 1 else None
            self.sent_s.append(time.monotonic())
            piece = {"delta": {"content": "a"}} if is_chat else {"text": "a"}
            await _send(response, {"choices": [{"index": 0, "finish_reason": end, **piece}]})
        if self.tells_usage:
            await _send(response, {"choices": [], "usage": self._usage(body)})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _whole(self, body: Json) -> Json:
        choice = {"index": 0, "text": "a" * body["max_tokens"], "finish_reason": "length"}
        return {"id": "cmpl", "choices": [choice], "usage": self._usage(body)}

    def _usage(self, body: Json) -> Json:
        prompt = body.get("prompt", [])
        num_prompt = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": body["max_tokens"],
            "queue_time": 0.001,
        }

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL}]})

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0", "revision": self.revision})

    async def status(self, _: web.Request) -> web.Response:
        return web.json_response({"workers": self.workers})


async def _send(response: web.StreamResponse, event: Json) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@asynccontextmanager
async def serving(server: FakeOpenAIServer) -> AsyncIterator[FakeOpenAIServer]:
    """Listen on a free port of loopback."""
    app = web.Application(client_max_size=2**24)
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_post("/v1/chat/completions", server.complete)
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/version", server.version)
    app.router.add_get("/v1/status", server.status)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    server.url = f"http://127.0.0.1:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()


@contextmanager
def in_a_thread(server: FakeOpenAIServer) -> Iterator[FakeOpenAIServer]:
    """Serve beside a command that has an event loop of its own."""
    loop, is_up = asyncio.new_event_loop(), threading.Event()
    is_over = asyncio.Event()

    async def serve() -> None:
        async with serving(server):
            is_up.set()
            await is_over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert is_up.wait(30)
        yield server
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join(30)
        loop.close()
