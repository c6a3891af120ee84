"""The shape of /v1/completions."""

from collections.abc import Sequence
from dataclasses import replace

from api.choice_text import TextDelta
from api.logprobs_formats import Json, completion_logprobs
from api.openai.frame import Frame, with_stop_reason


class CompletionFormat(Frame):
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

    def plain_chunk(self, index: int, text: str) -> Json:
        """Return new text of a choice that tells nothing else."""
        return self._chunk([self._choice(index, TextDelta(text, []))])

    def finish_chunk(self, index: int, delta: TextDelta) -> Json:
        """Return no text and the reason."""
        reason = delta.finish_reason.value if delta.finish_reason is not None else None
        chunk = self._chunk(
            [{"index": index, "text": "", "logprobs": None, "finish_reason": reason}]
        )
        return with_stop_reason(chunk, delta)

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
            "finish_reason": None if delta.finish_reason is None else delta.finish_reason.value,
            **({} if delta.finish_reason is None else {"stop_reason": delta.stop_string}),
            **self._token_ids(index, delta),
            **self._prompt_token_ids(index, delta),
            **self._prompt_logprobs(index, delta),
        }
