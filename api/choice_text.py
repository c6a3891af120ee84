"""One choice's tokens as text: whole characters, stop strings applied, logprobs beside them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from api.detokenizer import Detokenizer
from api.echo import trimmed
from api.generation_request import GenerationRequest
from api.parsers.part import Part, content, join_parts
from api.scored_tokens import ScoredToken, ScoredTokens
from api.stop_strings import StopStrings
from router.logprobs import TokenLogprobs
from router.request import FinishReason, TokenBatch


@dataclass(slots=True)
class TextDelta:
    """What one step added to a choice; its last one carries the finish reason."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_string: str | None = None  # which one ended it
    is_first: bool = False
    scored: list[ScoredToken] = field(default_factory=list)  # whose text is out by now
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # with the first one
    choice_index: int = 0
    parts: list[Part] = field(default_factory=list)  # of `text`, when it is to be read as a message


def join_deltas(deltas: Sequence[TextDelta]) -> TextDelta:
    """Return a whole answer out of its pieces."""
    return TextDelta(
        "".join(delta.text for delta in deltas),
        [token_id for delta in deltas for token_id in delta.token_ids],
        deltas[-1].finish_reason,
        deltas[-1].stop_string,
        is_first=True,
        scored=[token for delta in deltas for token in delta.scored],
        prompt_logprobs=[entry for delta in deltas for entry in delta.prompt_logprobs],
        choice_index=deltas[-1].choice_index,
        parts=join_parts(part for delta in deltas for part in delta.parts),
    )


def parts_of(request: GenerationRequest, delta: TextDelta) -> Sequence[Part]:
    """The parts of a message, also where nothing had to be parsed."""
    return content(delta.text) if request.reading is None else delta.parts


class ChoiceText:
    """Owns the text of one choice. Invariant: what is out of it holds no part of a stop string."""

    def __init__(
        self, request: GenerationRequest, choice_index: int, detokenizer: Detokenizer
    ) -> None:
        self.choice_index = choice_index
        self.num_tokens = 0
        self.finish_reason = ""
        self._request = request
        self._detokenizer = detokenizer
        self._stops = StopStrings(request.stop, is_stop_shown=request.has_stop_in_text)
        self._parser = request.reading.new_parser() if request.reading is not None else None
        self._parts: list[Part] = []  # of the batch at hand
        self.num_reasoning_tokens = 0
        self.has_calls = False
        self._scored = ScoredTokens()
        self._sum_logprobs = 0.0
        self._has_begun = False
        # Of the answer's text: known, and out. What lies between could become a stop string.
        self._num_characters = 0
        self._num_shown = 0

    @property
    def mean_logprob(self) -> float:
        """How likely its tokens were, on the whole; known when logprobs are computed."""
        return self._sum_logprobs / max(self.num_tokens, 1)

    def take(self, batch: TokenBatch) -> TextDelta:
        """Return what new tokens add."""
        delta = self._take(batch)
        delta.choice_index = self.choice_index
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value
        return delta

    def _take(self, batch: TokenBatch) -> TextDelta:
        first = self._begin(batch)
        texts = [first.text]
        last = len(batch.token_ids) - 1
        for index, token_id in enumerate(batch.token_ids):
            self.num_tokens += 1
            if self._parser is not None:
                self.num_reasoning_tokens += self._parser.is_reasoning
            is_stop = index == last and batch.finish_reason is FinishReason.STOP
            # A stop token counts; its text shows only if it was asked for.
            is_shown = not is_stop or self._request.has_stop_in_text
            text = self._detokenizer.push(token_id) if is_shown else ""
            self._score(token_id, text, batch.logprobs[index] if batch.logprobs else None)
            texts.append(self._read(self._filter(text)))
            if self._stops.stopped:
                return self._end(first, texts, batch.token_ids[: index + 1], FinishReason.STOP)
        reason = batch.finish_reason
        if reason is not None:
            texts.append(self._read(self._filter(self._detokenizer.flush())))
            if self._stops.stopped:
                return self._end(first, texts, batch.token_ids, FinishReason.STOP)
            texts.append(self._read(self._stops.flush()))
        return self._end(first, texts, batch.token_ids, reason)

    def _begin(self, batch: TokenBatch) -> TextDelta:
        """Return what stands before the tokens of a batch: on the first all about the prompt."""
        if self._has_begun:
            return TextDelta("", [])
        self._has_begun = True
        delta = TextDelta("", [], is_first=True)
        request, entries = self._request, batch.prompt_logprobs
        if (num_top := request.num_prompt_logprobs) is not None:
            delta.prompt_logprobs = [each for entry in entries if (each := trimmed(entry, num_top))]
        if request.echo is not None:
            delta.text = request.echo.text
            self._num_characters = len(delta.text)
            if request.num_logprobs is not None:
                delta.scored = request.echo.score(entries, request.num_logprobs)
        return delta

    def _score(self, token_id: int, text: str, logprobs: TokenLogprobs | None) -> None:
        start = self._num_characters
        self._num_characters += len(text)
        if logprobs is None:
            return
        self._sum_logprobs += logprobs.logprob
        if self._request.num_logprobs is not None:
            self._scored.push(ScoredToken(token_id, start, logprobs), end=self._num_characters)

    def _end(
        self, first: TextDelta, texts: list[str], token_ids: list[int], reason: FinishReason | None
    ) -> TextDelta:
        """Return the delta of a batch."""
        text = "".join(texts)
        self._num_shown += len(text)
        if reason is None:
            scored = self._scored.release(self._num_shown)
        else:
            # A stop string may have cut the text before the place where a token begins.
            scored = [
                replace(token, text_offset=min(token.text_offset, self._num_shown))
                for token in self._scored.flush()
            ]
        first.text = text
        first.token_ids = token_ids
        first.finish_reason = reason
        first.stop_string = self._stops.found
        first.scored += scored
        first.parts = self._take_parts(is_last=reason is not None)
        return first

    def _read(self, text: str) -> str:
        """Find the parts of a message in text that is out."""
        if self._parser is not None and text:
            self._parts += self._parser.push(text)
        return text

    def _take_parts(self, *, is_last: bool) -> list[Part]:
        if self._parser is None:
            return []
        parts, self._parts = self._parts, []
        if is_last:
            parts += self._parser.flush()
        self.has_calls = self.has_calls or any(part.begins_call for part in parts)
        return join_parts(parts)

    def _filter(self, text: str) -> str:
        """Let the text of the first min_tokens tokens pass; look for stop strings in the rest."""
        return text if self.num_tokens <= self._request.min_tokens else self._stops.push(text)
