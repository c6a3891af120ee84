"""What a request and its answer said, for its span; made only where the operator asked for it.

In the shape of OpenTelemetry's `gen_ai.input.messages` and `gen_ai.output.messages`: JSON text.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import orjson

from api.choice_text import TextDelta, parts_of
from api.generation_request import GenerationRequest
from api.parsers.part import Part, PartKind, join_parts
from telemetry import attributes

MAX_CHARACTERS: Final = 16_384  # of either side, all its messages together
MAX_PROMPT_TOKENS: Final = 4096  # of a prompt that is no chat; the rest is not turned into text
_CHARACTERS_BESIDE_TEXT = 64  # what a message and each of its parts take at least

Json = dict[str, object]
# Where the text of a part of each kind stands.
_TEXT_KEYS = {
    "text": "content",
    "reasoning": "content",
    "tool_call": "arguments",
    "tool_call_response": "response",
}


class Transcript:
    """Owns the words of one request. Invariant: it keeps no more of the answer than its bound."""

    def __init__(self, request: GenerationRequest, *, prompt: str) -> None:
        """`prompt` is the text of a request that is no chat."""
        self._request = request
        self._prompt = prompt
        self._num_kept = 0
        self._answers: list[list[Part]] = [[] for _ in range(request.num_choices)]
        self._reasons = [""] * request.num_choices
        self.is_cut = len(request.token_ids) > MAX_PROMPT_TOKENS and not request.messages

    def take(self, delta: TextDelta) -> None:
        """Note what a step added."""
        for part in parts_of(self._request, delta):
            if self._num_kept >= MAX_CHARACTERS:
                self.is_cut = True
                break
            self._num_kept += len(part.text) + 1
            self._answers[delta.choice_index].append(part)
        if delta.finish_reason is not None:
            self._reasons[delta.choice_index] = delta.finish_reason.value

    def input_messages(self) -> list[Json]:
        """What was asked, the oldest first."""
        if self._request.messages:
            return [_message(each) for each in self._request.messages]
        return [{"role": "user", "parts": [_part("text", self._prompt)]}]

    def output_messages(self) -> Iterator[Json]:
        """What was answered, choice by choice."""
        for parts, reason in zip(self._answers, self._reasons, strict=True):
            yield {
                "role": "assistant",
                "parts": [_answer_part(part) for part in join_parts(parts)],
                "finish_reason": reason,
            }


def content_attributes(transcripts: Sequence[Transcript]) -> dict[str, str | bool]:
    """Return what the span of one call says of them: of a long chat its end, of answers the first.

    Each side is bounded, and marked when something is missing.
    """
    asked = [message for each in transcripts for message in each.input_messages()]
    inputs, is_input_cut = _bounded(reversed(asked))
    outputs, is_output_cut = _bounded(
        message for each in transcripts for message in each.output_messages()
    )
    is_cut = is_input_cut or is_output_cut or any(each.is_cut for each in transcripts)
    return {
        attributes.GEN_AI_INPUT_MESSAGES: orjson.dumps(inputs[::-1]).decode(),
        attributes.GEN_AI_OUTPUT_MESSAGES: orjson.dumps(outputs).decode(),
        attributes.RELEVO_CONTENT_IS_CUT: is_cut,
    }


def _bounded(messages: Iterable[Json]) -> tuple[list[Json], bool]:
    """Keep as many as the bound allows, the last of them shortened; True when there were more."""
    left = MAX_CHARACTERS
    kept: list[Json] = []
    for message in messages:
        parts: list[Json] = []
        given = message["parts"]
        assert isinstance(given, list)
        for part in given:
            left -= _CHARACTERS_BESIDE_TEXT
            if left <= 0:
                return [*kept, {**message, "parts": parts}], True
            key = _TEXT_KEYS[part["type"]]
            parts.append({**part, key: part[key][:left]})
            left -= len(part[key])
        kept.append({**message, "parts": parts})
    return kept, left < 0


def _message(given: Mapping[str, object]) -> Json:
    """One message of a chat, as the conventions write it."""
    text = str(given.get("content", ""))
    if given["role"] == "tool":
        return {
            "role": "tool",
            "parts": [_part("tool_call_response", text, id=given.get("tool_call_id"))],
        }
    parts = []
    if thoughts := given.get("reasoning_content"):
        parts.append(_part("reasoning", str(thoughts)))
    if text:
        parts.append(_part("text", text))
    calls = given.get("tool_calls", ())
    assert isinstance(calls, list | tuple)
    for call in calls:
        function = call["function"]
        arguments = function["arguments"]
        written = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
        parts.append(_part("tool_call", written, id=call["id"], name=function["name"]))
    return {"role": given["role"], "parts": parts}


def _answer_part(part: Part) -> Json:
    if part.kind is PartKind.CALL:
        return _part("tool_call", part.text, id=part.call_id, name=part.name)
    return _part("text" if part.kind is PartKind.CONTENT else "reasoning", part.text)


def _part(kind: str, text: str, **more: object) -> Json:
    return {"type": kind, **more, _TEXT_KEYS[kind]: text}
