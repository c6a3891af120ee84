"""One request's outputs, carried from the engine's thread to a consumer on the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable

from engine.request import RequestOutput


class RequestStream:
    """Async iterator over one request's outputs; it ends after the one with a finish reason.

    Invariant: touched on its event loop only.
    """

    def __init__(self, request_id: str, on_close: Callable[["RequestStream"], None]) -> None:
        self.request_id = request_id
        self._on_close = on_close
        self._outputs: deque[RequestOutput] = deque()
        self._arrival = asyncio.Event()
        self._is_closed = False

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._outputs:
            if self._is_closed:
                raise StopAsyncIteration
            self._arrival.clear()
            await self._arrival.wait()
        output = self._outputs.popleft()
        if output.finish_reason is not None:
            self.close()
        return output

    def deliver(self, output: RequestOutput) -> None:
        """Hand one output to the consumer."""
        if not self._is_closed:
            self._outputs.append(output)
            self._arrival.set()

    def close(self) -> None:
        """Stop listening; the request itself is not touched."""
        if not self._is_closed:
            self._is_closed = True
            self._arrival.set()
            self._on_close(self)
