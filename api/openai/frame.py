"""What the shapes of OpenAI's text APIs share: the frame around the choices."""

from collections.abc import Sequence
from typing import Protocol

from api.answer_writer import Answering
from api.choice_text import TextDelta
from api.logprobs_formats import Json, prompt_logprobs


class AnswerFormat(Protocol):
    """Writes one request's answer. Every chunk of an answer shares id, creation time and model."""

    id: str

    def first_chunk(self, index: int) -> Json | None:
        """Return what opens a choice, if anything does."""
        ...

    def text_chunk(self, index: int, delta: TextDelta) -> Json | None:
        """Return what a step added to a choice, its end aside; None when there is nothing."""
        ...

    def tells_text_alone(self, index: int) -> bool:
        """Whether a choice's chunks differ in their text only, from the first text to the end."""
        ...

    def plain_chunk(self, index: int, text: str) -> Json:
        """Return new text of such a choice."""
        ...

    def finish_chunk(self, index: int, delta: TextDelta) -> Json:
        """Return the end of a choice; it has no text."""
        ...

    def usage_chunk(self, usage: Json) -> Json:
        """Return the chunk that carries usage and no choice."""
        ...

    def body(self, choices: Sequence[TextDelta], usage: Json) -> Json:
        """Return the whole answer at once."""
        ...


class Frame:
    """Owns what every chunk and the whole answer of one request have in common."""

    id_prefix = ""
    object_name = ""
    chunk_object_name = ""

    def __init__(self, answering: Answering) -> None:
        call = answering.call
        self.id = self.id_prefix + answering.streams[0].request_id
        self._requests = [  # of each choice
            request for request in call.requests for _ in range(request.num_shown_choices)
        ]
        self._model = answering.model
        self._created = answering.created
        self._token_bytes = answering.token_bytes
        self._has_usage = (
            call.streaming.has_usage_chunk
        )  # then every other chunk says `usage: null`
        self._echoed = call.echoed

    def tells_text_alone(self, index: int) -> bool:
        """Whether a choice's chunks differ in their text only, from the first text to the end."""
        request = self._requests[index]
        return (
            request.reading is None and request.num_logprobs is None and not request.has_token_ids
        )

    def _says_something(self, index: int, delta: TextDelta) -> bool:
        request = self._requests[index]
        has_ids = request.has_token_ids and bool(delta.token_ids)
        # Also of a prompt of one token, whose list is a null alone.
        tells_prompt = delta.is_first and request.num_prompt_logprobs is not None
        has_text = delta.text if request.reading is None else delta.parts
        return bool(has_text or delta.scored or tells_prompt or has_ids)

    def _prompt_logprobs(self, index: int, delta: TextDelta) -> Json:
        """The prompt's part, in the one delta that has it."""
        if self._requests[index].num_prompt_logprobs is None or not delta.is_first:
            return {}
        prompt = self._requests[index].token_ids
        return {
            "prompt_logprobs": prompt_logprobs(prompt, delta.prompt_logprobs, self._token_bytes)
        }

    def _token_ids(self, index: int, delta: TextDelta) -> Json:
        return {"token_ids": delta.token_ids} if self._requests[index].has_token_ids else {}

    def _prompt_token_ids(self, index: int, delta: TextDelta) -> Json:
        if not self._requests[index].has_token_ids:
            return {}
        return {
            "prompt_token_ids": list(self._requests[index].token_ids) if delta.is_first else None
        }

    def _chunk(self, choices: list[Json]) -> Json:
        chunk: Json = {
            "id": self.id,
            "object": self.chunk_object_name,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            **self._echoed,
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
            **self._echoed,
        }


def with_stop_reason(chunk: Json, delta: TextDelta) -> Json:
    """Say, as vLLM does, which stop string ended the choice."""
    choices = chunk["choices"]
    assert isinstance(choices, list)
    choices[0]["stop_reason"] = delta.stop_string
    return chunk
