"""One request's outputs, carried from the engine's thread to a consumer on the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from engine.request import RequestOutput


class RequestStream:
    """Async iterator over one request's outputs; it ends when each choice had its finish reason.

    Invariant: touched on its event loop only.
    """

    def __init__(
        self,
        request_id: str,
        on_close: Callable[["RequestStream"], None],
        *,
        choices: Iterable[int] = (0,),
    ) -> None:
        self.request_id = request_id
        self.open_choices = set(choices)  # whose end was not delivered
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
        if not self.open_choices and not self._outputs:
            self.close()
        return output

    def deliver(self, output: RequestOutput) -> None:
        """Hand one output to the consumer."""
        if not self._is_closed and self.open_choices:
            self._outputs.append(output)
            self._arrival.set()
            if output.finish_reason is not None:
                self.open_choices.discard(output.choice_index)

    def close(self) -> None:
        """Stop listening; the request itself is not touched."""
        if not self._is_closed:
            self._is_closed = True
            self._arrival.set()
            self._on_close(self)
