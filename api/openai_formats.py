"""The two shapes of OpenAI's text APIs: what a chunk and a whole answer look like."""

from typing import Protocol

from router.request import FinishReason

Json = dict[str, object]


class AnswerFormat(Protocol):
    """Writes one request's answer. Every chunk of an answer shares id, creation time and model."""

    id: str

    def first_chunk(self, index: int) -> Json | None:
        """Return what opens a choice, if anything does."""
        ...

    def text_chunk(self, index: int, text: str) -> Json:
        """Return new text of a choice."""
        ...

    def finish_chunk(self, index: int, reason: FinishReason) -> Json:
        """Return the end of a choice; it has no text."""
        ...

    def usage_chunk(self, usage: Json) -> Json:
        """Return the chunk that carries usage and no choice."""
        ...

    def body(self, choices: list[tuple[str, FinishReason]], usage: Json) -> Json:
        """Return the whole answer at once."""
        ...


class _Format:
    """What both formats share: the frame around the choices."""

    id_prefix = ""
    object_name = ""
    chunk_object_name = ""

    def __init__(self, request_id: str, *, model: str, created: int, has_usage: bool) -> None:
        self.id = self.id_prefix + request_id
        self._model = model
        self._created = created
        self._has_usage = has_usage  # then every other chunk says `usage: null`

    def _chunk(self, choices: list[Json]) -> Json:
        chunk: Json = {
            "id": self.id,
            "object": self.chunk_object_name,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        if self._has_usage:
            chunk["usage"] = None
        return chunk

    def usage_chunk(self, usage: Json) -> Json:
        """Return the chunk that carries usage and no choice."""
        return self._chunk([]) | {"usage": usage}

    def _body(self, choices: list[Json], usage: Json) -> Json:
        return {
            "id": self.id,
            "object": self.object_name,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": usage,
        }


class ChatFormat(_Format):
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def first_chunk(self, index: int) -> Json | None:
        """Say who speaks."""
        return self._choice(index, {"role": "assistant", "content": ""}, None)

    def text_chunk(self, index: int, text: str) -> Json:
        """Return new text."""
        return self._choice(index, {"content": text}, None)

    def finish_chunk(self, index: int, reason: FinishReason) -> Json:
        """Return an empty delta and the reason."""
        return self._choice(index, {}, reason.value)

    def _choice(self, index: int, delta: Json, reason: str | None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._chunk([choice])

    def body(self, choices: list[tuple[str, FinishReason]], usage: Json) -> Json:
        """Return a `chat.completion`."""
        return self._body(
            [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": text, "refusal": None},
                    "logprobs": None,
                    "finish_reason": reason.value,
                }
                for index, (text, reason) in enumerate(choices)
            ],
            usage,
        )


class CompletionFormat(_Format):
    """/v1/completions."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def first_chunk(self, index: int) -> Json | None:  # noqa: ARG002
        """Nothing opens a completion."""
        return None

    def text_chunk(self, index: int, text: str) -> Json:
        """Return new text."""
        return self._chunk([_completion_choice(index, text, None)])

    def finish_chunk(self, index: int, reason: FinishReason) -> Json:
        """Return no text and the reason."""
        return self._chunk([_completion_choice(index, "", reason)])

    def body(self, choices: list[tuple[str, FinishReason]], usage: Json) -> Json:
        """Return a `text_completion`."""
        return self._body(
            [
                _completion_choice(index, text, reason)
                for index, (text, reason) in enumerate(choices)
            ],
            usage,
        )


def _completion_choice(index: int, text: str, reason: FinishReason | None) -> Json:
    value = None if reason is None else reason.value
    return {"index": index, "text": text, "logprobs": None, "finish_reason": value}
