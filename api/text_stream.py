"""One running generation as text: tokens in, whole characters out, stop strings applied.

router batch -> each token: detokenise -> (after min_tokens) stop strings -> TextDelta
                                                 | a stop string: cut, close the generation
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from api.detokenizer import Detokenizer
from api.echo import trimmed
from api.errors import ApiError, Verdict
from api.generation_request import GenerationRequest
from api.scored_tokens import ScoredToken, ScoredTokens
from api.stop_strings import StopStrings
from api.upstream import UpstreamGeneration
from faults.plan import fault_point_async
from router.logprobs import TokenLogprobs
from router.report import RequestReport
from router.request import FinishReason, TokenBatch


@dataclass(slots=True)
class TextDelta:
    """What one step added; the last one carries the finish reason."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    is_first: bool = False
    scored: list[ScoredToken] = field(default_factory=list)  # whose text is out by now
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # with the first one


def join_deltas(deltas: Sequence[TextDelta]) -> TextDelta:
    """Return a whole answer out of its pieces."""
    return TextDelta(
        "".join(delta.text for delta in deltas),
        [token_id for delta in deltas for token_id in delta.token_ids],
        deltas[-1].finish_reason,
        is_first=True,
        scored=[token for delta in deltas for token in delta.scored],
        prompt_logprobs=[entry for delta in deltas for entry in delta.prompt_logprobs],
    )


class TextStream:
    """Owns one generation; it ends in one delta with a finish reason or in an error."""

    def __init__(
        self,
        request: GenerationRequest,
        *,
        request_id: str,
        request_label: str,
        generation: UpstreamGeneration,
        detokenizer: Detokenizer,
        on_close: Callable[[], None],
    ) -> None:
        self.request_id = request_id
        self.num_tokens = 0
        self.finish_reason = ""
        self.prompt = request.token_ids
        self.num_prompt_tokens = len(request.token_ids)
        self._request = request
        self._request_label = request_label
        self._generation = generation
        self._detokenizer = detokenizer
        self._stops = StopStrings(request.stop, is_stop_shown=request.has_stop_in_text)
        self._scored = ScoredTokens()
        self._has_begun = False
        # Of the answer's text: known, and out. What lies between could become a stop string.
        self._num_characters = 0
        self._num_shown = 0
        self._on_close = on_close
        self._is_finished = False
        self._aborting: asyncio.Task[None] | None = None

    @property
    def report(self) -> RequestReport:
        """Where time and tokens went so far."""
        return self._generation.report

    def __aiter__(self) -> "TextStream":
        return self

    async def __anext__(self) -> TextDelta:
        if self._is_finished:
            raise StopAsyncIteration
        try:
            batch = await self._next_batch()
            await fault_point_async("detokenize", request_label=self._request_label)
            delta = self._take(batch)
        except BaseException:
            await self.aclose()
            raise
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value
            await self._close(delta.finish_reason)
        return delta

    async def aclose(self) -> None:
        """End it wherever it runs; what it held is free when this returns. Idempotent."""
        await self._close(None)

    def abort(self) -> None:
        """End it from another task, at once, even when a slow client keeps its reader waiting."""
        if self._aborting is None and not self._is_finished:
            self._aborting = asyncio.get_running_loop().create_task(self._generation.aclose())

    async def _close(self, reason: FinishReason | None) -> None:
        self._is_finished = True
        try:
            await self._generation.aclose(reason)
        finally:
            self._on_close()

    async def _next_batch(self) -> TokenBatch:
        try:
            return await anext(self._generation)
        except StopAsyncIteration:
            if self._aborting is not None:
                raise ApiError(Verdict.CANCELLED, "The request was aborted") from None
            raise ApiError(Verdict.FAILED, "The generation ended without a finish reason") from None

    def _take(self, batch: TokenBatch) -> TextDelta:
        first = self._begin(batch)
        texts = [first.text]
        last = len(batch.token_ids) - 1
        for index, token_id in enumerate(batch.token_ids):
            self.num_tokens += 1
            is_stop = index == last and batch.finish_reason is FinishReason.STOP
            # A stop token counts; its text shows only if it was asked for.
            is_shown = not is_stop or self._request.has_stop_in_text
            text = self._detokenizer.push(token_id) if is_shown else ""
            self._score(token_id, text, batch.logprobs[index] if batch.logprobs else None)
            texts.append(self._filter(text))
            if self._stops.stopped:
                return self._end(first, texts, batch.token_ids[: index + 1], FinishReason.STOP)
        reason = batch.finish_reason
        if reason is not None:
            texts.append(self._filter(self._detokenizer.flush()))
            if self._stops.stopped:
                return self._end(first, texts, batch.token_ids, FinishReason.STOP)
            texts.append(self._stops.flush())
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
        if logprobs is not None:
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
        return replace(
            first,
            text=text,
            token_ids=token_ids,
            finish_reason=reason,
            scored=first.scored + scored,
        )

    def _filter(self, text: str) -> str:
        """Let the text of the first min_tokens tokens pass; look for stop strings in the rest."""
        return text if self.num_tokens <= self._request.min_tokens else self._stops.push(text)
