"""Writes responses and their events as OpenAI's Responses API does.

response.created, response.in_progress, then each item as `output` has it, response.completed
"""

from collections.abc import Iterator, Sequence

from api import sse
from api.answer_writer import Answering
from api.choice_text import TextDelta, parts_of
from api.errors import ApiError
from api.logprobs_formats import Json
from api.responses.output import OutputItem
from api.usage import Usage, x_relevo
from router.request import FinishReason


class ResponseWriter:
    """Owns the items of one response. Invariant: at most one is open, the last."""

    def __init__(self, answering: Answering) -> None:
        self._request_id = answering.streams[0].request_id
        self.id = f"resp_{self._request_id}"
        self._answering = answering
        self._request = answering.call.requests[0]
        self._items: list[OutputItem] = []
        self._done: list[Json] = []
        self._num_events = 0

    def events(self, index: int, delta: TextDelta) -> Iterator[bytes]:  # noqa: ARG002
        """Return the events of one delta."""
        if self._num_events == 0:
            for kind in ("response.created", "response.in_progress"):
                yield self._event({"type": kind, "response": self._response("in_progress")})
        for event in self._grow(delta):
            yield self._event(event)
        if delta.finish_reason is not None:
            status = _status(delta)
            body = self._response(status, is_ended=True)
            yield self._event({"type": f"response.{status}", "response": body})

    def last_events(self) -> Iterator[bytes]:
        """Return nothing: the response's own end is the last event."""
        return iter(())

    def failure(self, error: ApiError) -> bytes:
        """Return the event that ends a stream early."""
        return self._event(
            {
                "type": "error",
                "code": error.face.code,
                "message": error.message,
                "param": error.param,
            }
        )

    def body(self, choices: Sequence[TextDelta]) -> Json:
        """Return a whole response."""
        (answer,) = choices
        for _ in self._grow(answer):
            pass
        return self._response(_status(answer), is_ended=True)

    def _grow(self, delta: TextDelta) -> Iterator[Json]:
        for part in parts_of(self._request, delta):
            last = self._items[-1] if len(self._items) > len(self._done) else None
            if last is None or not part.continues(last.part):
                if last is not None:
                    yield from self._close(last, "completed")
                last = OutputItem.of(part, self._request_id, len(self._items))
                self._items.append(last)
                yield from last.begun()
            if part.text:
                yield last.grown(part.text)
        if delta.finish_reason is not None and len(self._items) > len(self._done):
            yield from self._close(self._items[-1], _status(delta))

    def _close(self, item: OutputItem, status: str) -> list[Json]:
        self._done.append(item.to_dict(status))
        return item.ended(status)

    def _response(self, status: str, *, is_ended: bool = False) -> Json:
        is_cut = status == "incomplete"
        response: Json = {
            "id": self.id,
            "object": "response",
            "created_at": self._answering.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._answering.model,
            "output": list(self._done),
            "usage": None,
            **self._answering.call.echoed,
        }
        if is_ended:
            streams = self._answering.streams
            response |= {"usage": _usage(Usage.of(streams)), "x_relevo": x_relevo(streams)}
        return response

    def _event(self, value: Json) -> bytes:
        numbered = {**value, "sequence_number": self._num_events}
        self._num_events += 1
        return sse.event(numbered, name=str(value["type"]))


def _status(delta: TextDelta) -> str:
    return "incomplete" if delta.finish_reason is FinishReason.LENGTH else "completed"


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        **usage.times(),
    }
