"""Writes messages and their events as Anthropic does.

message_start, then each block: content_block_start, content_block_delta..., content_block_stop;
message_delta, message_stop
"""

from collections.abc import Iterator, Sequence

import orjson

from api import sse
from api.answer_writer import Answering
from api.choice_text import TextDelta, parts_of
from api.errors import ApiError
from api.logprobs_formats import Json
from api.parsers.part import Part, PartKind
from api.usage import Usage, x_relevo
from router.request import FinishReason


class MessageWriter:
    """Owns the blocks of one message. Invariant: at most one is open, the last."""

    def __init__(self, answering: Answering) -> None:
        self.id = f"msg_{answering.streams[0].request_id}"
        self._answering = answering
        self._request = answering.call.requests[0]
        self._shows_thoughts = bool(answering.call.echoed["thinking"])
        self._is_begun = False
        self._open: Part | None = None  # the last piece of the open block
        self._num_blocks = 0
        self._has_calls = False

    def events(self, index: int, delta: TextDelta) -> Iterator[bytes]:  # noqa: ARG002
        """Return the events of one delta."""
        if not self._is_begun:
            self._is_begun = True
            message = self._message([], None, None)
            yield _event({"type": "message_start", "message": message})
        for part in self._shown(delta):
            if self._open is None or not part.continues(self._open):
                yield from self._close()
                yield self._start(part)
            self._open = part
            if part.text:
                yield _event(
                    {
                        "type": "content_block_delta",
                        "index": self._num_blocks,
                        "delta": _delta(part),
                    }
                )
        if delta.finish_reason is not None:
            yield from self._close()
            yield _event(
                {
                    "type": "message_delta",
                    "delta": {
                        "stop_reason": self._reason(delta),
                        "stop_sequence": delta.stop_string,
                    },
                    "usage": self._usage(),
                    "x_relevo": x_relevo(self._answering.streams),
                }
            )

    def last_events(self) -> Iterator[bytes]:
        """Return the end."""
        yield _event({"type": "message_stop"})

    def failure(self, error: ApiError) -> bytes:
        """Return Anthropic's error event."""
        return _event(error.to_anthropic(self._answering.streams[0].request_id))

    def body(self, choices: Sequence[TextDelta]) -> Json:
        """Return a whole message."""
        (answer,) = choices
        blocks = [_block(part, is_whole=True) for part in self._shown(answer)]
        message = self._message(blocks, self._reason(answer), answer.stop_string)
        return {**message, "x_relevo": x_relevo(self._answering.streams)}

    def _shown(self, delta: TextDelta) -> list[Part]:
        parts = [
            part
            for part in parts_of(self._request, delta)
            if self._shows_thoughts or part.kind is not PartKind.REASONING
        ]
        self._has_calls |= any(part.begins_call for part in parts)
        return parts

    def _start(self, part: Part) -> bytes:
        block = _block(part, is_whole=False)
        return _event(
            {"type": "content_block_start", "index": self._num_blocks, "content_block": block}
        )

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            yield _event({"type": "content_block_stop", "index": self._num_blocks})
            self._open = None
            self._num_blocks += 1

    def _reason(self, delta: TextDelta) -> str:
        if delta.finish_reason is FinishReason.LENGTH:
            return "max_tokens"
        if delta.stop_string is not None:
            return "stop_sequence"
        return "tool_use" if self._has_calls else "end_turn"

    def _message(self, blocks: list[Json], reason: str | None, stop_sequence: str | None) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._answering.model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": stop_sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> Json:
        """Tokens as Anthropic counts them: those from the cache apart; and our times."""
        usage = Usage.of(self._answering.streams)
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            **usage.times(),
        }


def _block(part: Part, *, is_whole: bool) -> Json:
    text = part.text if is_whole else ""
    if part.kind is PartKind.CONTENT:
        return {"type": "text", "text": text}
    if part.kind is PartKind.REASONING:
        return {"type": "thinking", "thinking": text, "signature": ""}
    arguments = _loaded(text) if is_whole else {}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": arguments}


def _delta(part: Part) -> Json:
    if part.kind is PartKind.CONTENT:
        return {"type": "text_delta", "text": part.text}
    if part.kind is PartKind.REASONING:
        return {"type": "thinking_delta", "thinking": part.text}
    return {"type": "input_json_delta", "partial_json": part.text}


def _loaded(text: str) -> object:
    """Arguments are an object here; a model that broke off wrote none."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}


def _event(value: Json) -> bytes:
    return sse.event(value, name=str(value["type"]))
