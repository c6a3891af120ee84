"""One running generation as text: tokens in, whole characters out, stop strings applied.

router batch -> each token: detokenise -> (after min_tokens) stop strings -> TextDelta
                                                 | a stop string: cut, close the generation
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from api.detokenizer import Detokenizer
from api.errors import ApiError, Verdict
from api.generation_request import GenerationRequest
from api.stop_strings import StopStrings
from api.upstream import UpstreamGeneration
from faults.plan import fault_point_async
from router.report import RequestReport
from router.request import FinishReason, TokenBatch


@dataclass(slots=True)
class TextDelta:
    """What one step added; the last one carries the finish reason."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None


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
        self.num_prompt_tokens = len(request.token_ids)
        self._min_tokens = request.min_tokens
        self._request_label = request_label
        self._generation = generation
        self._detokenizer = detokenizer
        self._stops = StopStrings(request.stop)
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
        texts: list[str] = []
        last = len(batch.token_ids) - 1
        for index, token_id in enumerate(batch.token_ids):
            self.num_tokens += 1
            if index == last and batch.finish_reason is FinishReason.STOP:
                break  # the stop token counts, its text does not show
            texts.append(self._filter(self._detokenizer.push(token_id)))
            if self._stops.stopped:
                token_ids = batch.token_ids[: index + 1]
                return TextDelta("".join(texts), token_ids, FinishReason.STOP)
        if batch.finish_reason is None:
            return TextDelta("".join(texts), batch.token_ids)
        texts.append(self._filter(self._detokenizer.flush()))
        if self._stops.stopped:
            return TextDelta("".join(texts), batch.token_ids, FinishReason.STOP)
        texts.append(self._stops.flush())
        return TextDelta("".join(texts), batch.token_ids, batch.finish_reason)

    def _filter(self, text: str) -> str:
        """Let the text of the first min_tokens tokens pass; look for stop strings in the rest."""
        return text if self.num_tokens <= self._min_tokens else self._stops.push(text)
