"""An engine loop without an engine: tests say what comes out of it."""

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from engine.request import FinishReason, Request, RequestOutput, Reservation
from engine.request_stream import RequestStream


class FakeEngineLoop:
    """Remembers what was asked and streams what the test delivers."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.submit_error: Exception | None = None
        self.requests: dict[str, Request] = {}
        self.streams: dict[str, RequestStream] = {}
        self.aborted: list[str] = []
        self.activated: list[tuple[str, dict[int, int]]] = []
        self.aborted_choices: list[int] = []
        self.on_submit: Callable[[str], None] = lambda request_id: None

    @property
    def only_id(self) -> str:
        (request_id,) = self.requests
        return request_id

    async def submit(self, request: Request) -> RequestStream:
        if self.submit_error is not None:
            raise self.submit_error
        self.requests[request.request_id] = request
        stream = self.open_stream(request.request_id, request.choices)
        self.on_submit(request.request_id)
        return stream

    async def reserve(self, request: Request) -> Reservation:
        self.requests[request.request_id] = request
        return Reservation(block_ids=[0, 1], num_cached_tokens=0)

    async def call(self, verb: Callable[[Any], Any]) -> Any:
        return verb(SimpleNamespace(activate=self._activate))

    def open_stream(self, request_id: str, choices: Iterable[int] = (0,)) -> RequestStream:
        stream = RequestStream(request_id, lambda closed: None, choices=choices)
        self.streams[request_id] = stream
        return stream

    def abort(self, request_id: str, *, in_flight: Sequence[int] = ()) -> None:
        self.aborted.append(request_id)
        if request_id in self.streams:
            for choice_index in sorted(self.streams[request_id].open_choices):
                self.deliver(
                    request_id, choice_index=choice_index, finish_reason=FinishReason.ABORT
                )

    def abort_choice(self, request_id: str, choice_index: int) -> None:
        self.aborted_choices.append(choice_index)
        if request_id in self.streams:
            self.deliver(request_id, choice_index=choice_index, finish_reason=FinishReason.ABORT)

    def deliver(
        self,
        request_id: str,
        *,
        choice_index: int = 0,
        token_ids: tuple[int, ...] = (),
        num_computed_tokens: int = 0,
        finish_reason: FinishReason | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        output = RequestOutput(
            request_id=request_id,
            choice_index=choice_index,
            start_position=num_computed_tokens,
            token_ids=token_ids,
            num_computed_tokens=num_computed_tokens,
            num_cached_tokens=0,
            finish_reason=finish_reason,
            error=error,
        )
        self.streams[request_id].deliver(output)
        return output

    def _activate(self, request_id: str, tokens: dict[int, int]) -> list[RequestOutput]:
        self.activated.append((request_id, tokens))
        return []
