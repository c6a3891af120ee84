"""The two shapes of OpenAI's text APIs: what a chunk and a whole answer look like."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from api.choice_text import TextDelta
from api.logprobs_formats import Json, chat_logprobs, completion_logprobs, prompt_logprobs
from api.openai.requests import Call
from api.token_text import TokenBytes
from router.request import FinishReason


class AnswerFormat(Protocol):
    """Writes one request's answer. Every chunk of an answer shares id, creation time and model."""

    id: str

    def first_chunk(self, index: int) -> Json | None:
        """Return what opens a choice, if anything does."""
        ...

    def text_chunk(self, index: int, delta: TextDelta) -> Json | None:
        """Return what a step added to a choice, its end aside; None when there is nothing."""
        ...

    def finish_chunk(self, index: int, reason: FinishReason) -> Json:
        """Return the end of a choice; it has no text."""
        ...

    def usage_chunk(self, usage: Json) -> Json:
        """Return the chunk that carries usage and no choice."""
        ...

    def body(self, choices: Sequence[TextDelta], usage: Json) -> Json:
        """Return the whole answer at once."""
        ...


class _Format:
    """What both formats share: the frame around the choices."""

    id_prefix = ""
    object_name = ""
    chunk_object_name = ""

    def __init__(
        self, request_id: str, call: Call, *, model: str, created: int, token_bytes: TokenBytes
    ) -> None:
        self.id = self.id_prefix + request_id
        self._requests = [  # of each choice
            request for request in call.requests for _ in range(request.num_shown_choices)
        ]
        self._model = model
        self._created = created
        self._token_bytes = token_bytes
        self._has_usage = call.has_usage_chunk  # then every other chunk says `usage: null`

    def _says_something(self, index: int, delta: TextDelta) -> bool:
        request = self._requests[index]
        has_ids = request.has_token_ids and bool(delta.token_ids)
        # Also of a prompt of one token, whose list is a null alone.
        tells_prompt = delta.is_first and request.num_prompt_logprobs is not None
        return bool(delta.text or delta.scored or tells_prompt or has_ids)

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

    def text_chunk(self, index: int, delta: TextDelta) -> Json | None:
        """Return new text and what is known of its tokens; about the prompt, beside the choices."""
        if not self._says_something(index, delta):
            return None
        content: Json = {"content": delta.text} if delta.text else {}
        chunk = self._choice(index, content, None, logprobs=self._logprobs(index, delta))
        choices = chunk["choices"]
        assert isinstance(choices, list)
        choices[0] |= self._token_ids(index, delta)
        return chunk | self._prompt_part(index, delta)

    def finish_chunk(self, index: int, reason: FinishReason) -> Json:
        """Return an empty delta and the reason."""
        return self._choice(index, {}, reason.value)

    def _choice(
        self, index: int, delta: Json, reason: str | None, *, logprobs: Json | None = None
    ) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._chunk([choice])

    def _logprobs(self, index: int, delta: TextDelta) -> Json | None:
        if self._requests[index].num_logprobs is None or not delta.scored:
            return None
        return chat_logprobs(delta.scored, self._token_bytes)

    def _prompt_part(self, index: int, delta: TextDelta) -> Json:
        return self._prompt_logprobs(index, delta) | self._prompt_token_ids(index, delta)

    def body(self, choices: Sequence[TextDelta], usage: Json) -> Json:
        """Return a `chat.completion`."""
        body = self._body(
            [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": answer.text, "refusal": None},
                    "logprobs": self._logprobs(index, answer),
                    "finish_reason": _reason(answer),
                    **self._token_ids(index, answer),
                }
                for index, answer in enumerate(choices)
            ],
            usage,
        )
        return body | self._prompt_part(0, choices[0])


class CompletionFormat(_Format):
    """/v1/completions."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def first_chunk(self, index: int) -> Json | None:  # noqa: ARG002
        """Nothing opens a completion."""
        return None

    def text_chunk(self, index: int, delta: TextDelta) -> Json | None:
        """Return new text and what is known of its tokens."""
        if not self._says_something(index, delta):
            return None
        return self._chunk([self._choice(index, replace(delta, finish_reason=None))])

    def finish_chunk(self, index: int, reason: FinishReason) -> Json:
        """Return no text and the reason."""
        return self._chunk(
            [{"index": index, "text": "", "logprobs": None, "finish_reason": reason.value}]
        )

    def body(self, choices: Sequence[TextDelta], usage: Json) -> Json:
        """Return a `text_completion`."""
        return self._body(
            [self._choice(index, answer) for index, answer in enumerate(choices)], usage
        )

    def _choice(self, index: int, delta: TextDelta) -> Json:
        has_logprobs = self._requests[index].num_logprobs is not None and delta.scored
        return {
            "index": index,
            "text": delta.text,
            "logprobs": completion_logprobs(delta.scored, self._token_bytes)
            if has_logprobs
            else None,
            "finish_reason": _reason(delta),
            **self._token_ids(index, delta),
            **self._prompt_token_ids(index, delta),
            **self._prompt_logprobs(index, delta),
        }


def _reason(delta: TextDelta) -> str | None:
    return None if delta.finish_reason is None else delta.finish_reason.value
