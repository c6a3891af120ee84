"""Writes chunks and whole answers as OpenAI's text APIs do."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from api import sse
from api.answer_writer import Answering
from api.choice_text import TextDelta
from api.errors import ApiError
from api.logprobs_formats import Json
from api.openai.chat_format import ChatFormat
from api.openai.completion_format import CompletionFormat
from api.openai.frame import AnswerFormat
from api.usage import Usage, x_relevo


class OpenAiWriter:
    """Owns which choices are open; what a chunk looks like is the format's affair."""

    def __init__(self, answering: Answering, format_: AnswerFormat) -> None:
        self._format = format_
        self._streams = answering.streams
        self._streaming = answering.call.streaming
        self._opened: set[int] = set()
        self._molds: dict[int, sse.EventMold] = {}  # of choices that tell nothing but text
        self.id = self._format.id

    def events(self, index: int, delta: TextDelta) -> Iterable[bytes]:
        """Return the chunks of one delta: the role, the text, the end, each by itself."""
        mold = self._molds.get(index)
        # Nearly every delta of nearly every stream: one text and nothing else.
        if mold is not None and delta.text and delta.finish_reason is None:
            return (mold.fill(delta.text),)
        return self._chunks(index, delta)

    def _chunks(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        if index not in self._opened:
            self._opened.add(index)
            if (first := self._format.first_chunk(index)) is not None:
                yield self._event(first)
            if self._format.tells_text_alone(index) and not self._streaming.has_running_usage:
                self._molds[index] = sse.EventMold(partial(self._format.plain_chunk, index))
        if (chunk := self._format.text_chunk(index, delta)) is not None:
            yield self._event(chunk)
        if delta.finish_reason is not None:
            chunk = self._format.finish_chunk(index, delta)
            is_last = all(stream.is_finished for stream in self._streams)
            if is_last and not self._streaming.has_usage_chunk:
                chunk["x_relevo"] = x_relevo(self._streams)
            yield self._event(chunk)

    def last_events(self) -> Iterator[bytes]:
        """Return usage, where it is wanted, and the mark of the end."""
        if self._streaming.has_usage_chunk:
            chunk = self._format.usage_chunk(Usage.of(self._streams).to_dict())
            yield sse.event({**chunk, "x_relevo": x_relevo(self._streams)})
        yield sse.DONE

    def failure(self, error: ApiError) -> bytes:
        """Return OpenAI's error object as an event."""
        return sse.event(error.to_dict(self._streams[0].request_id))

    def body(self, choices: Sequence[TextDelta]) -> Json:
        """Return the whole answer at once."""
        body = self._format.body(choices, Usage.of(self._streams).to_dict())
        return {**body, "x_relevo": x_relevo(self._streams)}

    def _event(self, chunk: Json) -> bytes:
        if self._streaming.has_running_usage:
            chunk["usage"] = Usage.of(self._streams).to_dict()
        return sse.event(chunk)


def chat_writer(answering: Answering) -> OpenAiWriter:
    """Write /v1/chat/completions."""
    return OpenAiWriter(answering, ChatFormat(answering))


def completion_writer(answering: Answering) -> OpenAiWriter:
    """Write /v1/completions."""
    return OpenAiWriter(answering, CompletionFormat(answering))
