"""The shape of /v1/chat/completions."""

from collections.abc import Sequence

from api.answer_writer import Answering
from api.choice_text import TextDelta
from api.logprobs_formats import Json, chat_logprobs
from api.openai.frame import Frame, with_stop_reason
from api.parsers.part import Part, PartKind, text_of
from router.request import FinishReason


class ChatFormat(Frame):
    """Writes messages: what is said, what is thought, which tools are called."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, answering: Answering) -> None:
        super().__init__(answering)
        self._calling: set[int] = set()  # choices that called a tool

    def first_chunk(self, index: int) -> Json | None:
        """Say who speaks."""
        return self._choice(index, {"role": "assistant", "content": ""}, None)

    def text_chunk(self, index: int, delta: TextDelta) -> Json | None:
        """Return new text and what is known of its tokens; about the prompt, beside the choices."""
        if not self._says_something(index, delta):
            return None
        if self._requests[index].reading is None:
            content: Json = {"content": delta.text} if delta.text else {}
        else:
            content = _delta(delta.parts)
            self._note_calls(index, delta.parts)
        chunk = self._choice(index, content, None, logprobs=self._logprobs(index, delta))
        choices = chunk["choices"]
        assert isinstance(choices, list)
        choices[0] |= self._token_ids(index, delta)
        return chunk | self._prompt_part(index, delta)

    def plain_chunk(self, index: int, text: str) -> Json:
        """Return new text of a choice that tells nothing else."""
        return self._choice(index, {"content": text}, None)

    def finish_chunk(self, index: int, delta: TextDelta) -> Json:
        """Return an empty delta and the reason."""
        assert delta.finish_reason is not None
        chunk = self._choice(index, {}, self._reason(index, delta.finish_reason))
        return with_stop_reason(chunk, delta)

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

    def _note_calls(self, index: int, parts: Sequence[Part]) -> None:
        if any(part.begins_call for part in parts):
            self._calling.add(index)

    def _reason(self, index: int, reason: FinishReason) -> str:
        """An answer that ends with calls ends for them, unless the client named the one to make."""
        reading = self._requests[index].reading
        is_for_calls = index in self._calling and reading is not None and not reading.is_named
        return "tool_calls" if is_for_calls and reason is FinishReason.STOP else reason.value

    def body(self, choices: Sequence[TextDelta], usage: Json) -> Json:
        """Return a `chat.completion`."""
        whole = [self._whole(index, answer) for index, answer in enumerate(choices)]
        return self._body(whole, usage) | self._prompt_part(0, choices[0])

    def _whole(self, index: int, answer: TextDelta) -> Json:
        assert answer.finish_reason is not None, "an answer has an end"
        message: Json = {"role": "assistant", "content": answer.text, "refusal": None}
        if self._requests[index].reading is not None:
            self._note_calls(index, answer.parts)
            message |= _message(answer.parts)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(index, answer),
            "finish_reason": self._reason(index, answer.finish_reason),
            "stop_reason": answer.stop_string,
            **self._token_ids(index, answer),
        }


def _delta(parts: Sequence[Part]) -> Json:
    """The parts of one step."""
    delta: Json = {}
    if thought := text_of(parts, PartKind.REASONING):
        delta["reasoning_content"] = thought
    if said := text_of(parts, PartKind.CONTENT):
        delta["content"] = said
    calls = [_call(part) for part in parts if part.kind is PartKind.CALL]
    return delta | ({"tool_calls": calls} if calls else {})


def _call(part: Part) -> Json:
    if not part.begins_call:
        return {"index": part.call_index, "function": {"arguments": part.text}}
    function = {"name": part.name, "arguments": part.text}
    return {"index": part.call_index, "id": part.call_id, "type": "function", "function": function}


def _message(parts: Sequence[Part]) -> Json:
    """The parts of a whole answer."""
    message: Json = {"content": text_of(parts, PartKind.CONTENT)}
    if thought := text_of(parts, PartKind.REASONING):
        message["reasoning_content"] = thought
    calls = [
        {
            "id": part.call_id,
            "type": "function",
            "function": {"name": part.name, "arguments": part.text},
        }
        for part in parts
        if part.kind is PartKind.CALL
    ]
    if calls:
        message |= {"tool_calls": calls, "content": message["content"] or None}
    return message
