"""One streamed answer after the other over HTTP, at little cost of its own.

It shares the machine with what it measures, hence a C parser, no objects per token but a time,
and JSON of each event by orjson.
"""

import asyncio
import contextlib
import random
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import aiohttp
import orjson

from load_generator.outcome import Ending, Outcome
from load_generator.planned_request import PlannedRequest

CONNECT_WITHIN_S: Final = 10.0
LONGEST_PAUSE_S: Final = 30.0  # before a retry, whatever the server asks for
FIRST_PAUSE_S: Final = 0.25
SLOW_BUFFER_BYTES: Final = 4096  # of one who reads slowly, in the kernel and here
REFUSALS: Final = frozenset({429, 503, 529})
BROKEN: Final = 0  # no answer, or not to its end


class Client:
    """Asks one server; use it in `async with`."""

    def __init__(
        self,
        url: str,
        *,
        path: str = "/v1/completions",
        api_key: str = "",
        timeout_s: float = 600.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + path
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._now = now
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "Client":
        self._fast = await self._stack.enter_async_context(self._session(socket.socket))
        self._slow = await self._stack.enter_async_context(
            self._session(_narrow_socket, buffer_bytes=SLOW_BUFFER_BYTES)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _session(
        self, make_socket: Callable[..., socket.socket], *, buffer_bytes: int = 2**16
    ) -> aiohttp.ClientSession:
        # A client that limits its connections would measure its own queue.
        connector = aiohttp.TCPConnector(
            limit=0,
            ssl=ssl.create_default_context() if self._url.startswith("https:") else False,
            socket_factory=lambda info: make_socket(info[0], info[1], info[2]),
        )
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_WITHIN_S)
        return aiohttp.ClientSession(
            connector=connector, headers=self._headers, timeout=timeout, read_bufsize=buffer_bytes
        )

    async def ask(self, request: PlannedRequest, due_s: float) -> Outcome:
        """Send it, again where it may be retried, and read to its end; never raises for it."""
        outcome = Outcome(request=request, due_s=due_s, sent_s=self._now())
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._ask(outcome)
        except TimeoutError:
            outcome.error = f"no end within {self._timeout_s:g} s"
        outcome.ended_s = self._now()
        return outcome

    async def _ask(self, outcome: Outcome) -> None:
        while True:
            outcome.begin()
            retry_after_s = await self._attempt(outcome)
            may_retry = outcome.status in {BROKEN, *REFUSALS}
            if not outcome.has_failed or not may_retry:
                return
            if outcome.num_attempts > outcome.request.retries:
                return
            await asyncio.sleep(_pause_s(retry_after_s, outcome.num_attempts))

    async def _attempt(self, outcome: Outcome) -> float | None:
        """One attempt; the server's own hint when to come back, if it gave one."""
        request = outcome.request
        session = self._fast if request.read_tokens_per_s is None else self._slow
        try:
            async with session.post(
                self._url, data=request.body, headers=request.headers
            ) as response:
                outcome.status = response.status
                if response.status != 200:
                    outcome.error = f"{response.status}: {_reason(await response.read())}"
                    return _retry_after_s(response.headers)
                await self._read(response, outcome)
        except (aiohttp.ClientError, OSError) as error:
            outcome.status = BROKEN
            outcome.error = f"the connection broke: {type(error).__name__}"
        except ValueError as error:  # of JSON
            outcome.error = f"the stream is not what it should be: {error}"
        return None

    async def _read(self, response: aiohttp.ClientResponse, outcome: Outcome) -> None:
        request = outcome.request
        async for event in events(response.content):
            if event is None:
                break
            outcome.take(event, self._now())
            num_tokens = len(outcome.token_times_s)
            if num_tokens == request.cancel_after_tokens:
                outcome.ending = Ending.CANCELLED
                response.close()
                return
            if request.read_tokens_per_s is not None:
                await asyncio.sleep(1 / request.read_tokens_per_s)
        if outcome.error:
            outcome.error = f"an error in the stream: {outcome.error[:200]}"
        elif not outcome.finish_reason:
            outcome.status = BROKEN
            outcome.error = "the stream ended without a finish reason"
        else:
            outcome.ending = Ending.COMPLETED


async def events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any] | None]:
    """The events of a stream as they come; None is its regular end."""
    pending = b""
    async for block in content.iter_any():
        *lines, pending = (pending + block).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            yield None if data == b"[DONE]" else orjson.loads(data)


def _narrow_socket(family: int, kind: int, protocol: int) -> socket.socket:
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_BYTES)
    return made


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    try:
        return float(headers.get("retry-after", ""))
    except ValueError:
        return None


def _pause_s(retry_after_s: float | None, num_attempts: int) -> float:
    """What the server asks for, else longer each time; apart from others who got the same hint."""
    asked_s = FIRST_PAUSE_S * 2 ** (num_attempts - 1) if retry_after_s is None else retry_after_s
    return min(asked_s, LONGEST_PAUSE_S) * random.uniform(1.0, 1.25)


def _reason(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
