"""One running generation as text: batches of tokens in, deltas of its choices out.

router batch -> its choice: each token: detokenise -> (after min_tokens) stop strings -> TextDelta
                                | a stop string: cut, end the choice; the last one: the generation
"""

import asyncio
from collections.abc import Callable, Sequence

from api.choice_text import ChoiceText, TextDelta
from api.detokenizer import DetokenizerFactory
from api.errors import ApiError, Verdict, invalid
from api.generation_request import GenerationRequest
from api.transcript import Transcript
from api.upstream import UpstreamGeneration
from faults.plan import fault_point_async
from router.errors import InvalidRequest, NeverFits
from router.report import RequestReport
from router.request import FinishReason, TokenBatch

# Of an answer that is shown as a whole.
GATHERED_TOKENS = 64


class TextStream:
    """Owns one generation; each choice ends in a delta with a finish reason, or all in an error."""

    def __init__(
        self,
        request: GenerationRequest,
        *,
        request_id: str,
        request_label: str,
        generation: UpstreamGeneration,
        new_detokenizer: DetokenizerFactory,
        on_close: Callable[[], None],
    ) -> None:
        self.request_id = request_id
        self.request = request
        self.prompt = request.token_ids
        self.num_prompt_tokens = len(request.token_ids)
        self.choices = [
            ChoiceText(request, choice_index, new_detokenizer())
            for choice_index in range(request.num_choices)
        ]
        self._num_shown = request.num_shown_choices
        self._structured_output = request.structured_output
        self._open_choices = set(range(request.num_choices))
        self._request_label = request_label
        self._generation = generation
        self._on_close = on_close
        self.transcript: Transcript | None = None  # of all deltas, where one is kept
        self.is_finished = False
        self._last_report: RequestReport | None = None  # once nothing runs any more
        self._aborting: asyncio.Task[None] | None = None
        self._abort_error: ApiError | None = None  # what its reader is told then

    @property
    def report(self) -> RequestReport:
        """Where time and tokens went so far."""
        return self._generation.report if self._last_report is None else self._last_report

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_reasoning_tokens(self) -> int:
        """Those of them that are thought, as far as can be told."""
        return sum(choice.num_reasoning_tokens for choice in self.choices)

    @property
    def best_choices(self) -> Sequence[ChoiceText]:
        """Those to show: all in order, or the best of them by the mean logprob of their tokens."""
        if self._num_shown == len(self.choices):
            return self.choices
        ranked = sorted(self.choices, key=lambda choice: choice.mean_logprob, reverse=True)
        return ranked[: self._num_shown]

    def __aiter__(self) -> "TextStream":
        return self

    async def __anext__(self) -> TextDelta:
        if self.is_finished:
            raise StopAsyncIteration
        try:
            batch = await self._next_batch()
            await fault_point_async("detokenize", request_label=self._request_label)
            delta = self.choices[batch.choice_index].take(batch)
        except BaseException:
            await self.aclose()
            raise
        if self.transcript is not None:
            self.transcript.take(delta)
        if delta.finish_reason is not None:
            self._open_choices.discard(delta.choice_index)
            if not self._open_choices:
                await self._close(delta.finish_reason)
            elif batch.finish_reason is None:
                # A stop string is known here alone: the workers would go on.
                self._generation.end_choice(delta.choice_index)
        return delta

    def gather(self) -> None:
        """Read many tokens at once: nothing is shown on the way."""
        # A stop string is found here, and the workers go on until it is.
        if not self.request.stop:
            self._generation.gather(GATHERED_TOKENS)

    async def aclose(self) -> None:
        """End it wherever it runs; what it held is free when this returns. Idempotent."""
        await self._close(None)

    def abort(self, verdict: Verdict, message: str) -> None:
        """End it from another task, at once, even when a slow client keeps its reader waiting."""
        if self._aborting is None and not self.is_finished:
            self._abort_error = ApiError(verdict, message)
            self._aborting = asyncio.get_running_loop().create_task(self._generation.aclose())

    async def _close(self, reason: FinishReason | None) -> None:
        self.is_finished = True
        try:
            await self._generation.aclose(reason)
            # Each is made anew, and at the end everybody asks for it.
            self._last_report = self._generation.report
        finally:
            self._on_close()

    async def _next_batch(self) -> TokenBatch:
        try:
            return await anext(self._generation)
        except StopAsyncIteration:
            if self._abort_error is not None:
                raise self._abort_error from None
            raise ApiError(Verdict.FAILED, "The generation ended without a finish reason") from None
        except NeverFits:
            raise
        except InvalidRequest as error:
            if self._structured_output is None:
                raise
            # All else was judged at the door; how far a grammar leads is known on the way only.
            field = self._structured_output.field
            raise invalid(f"{field} cannot be enforced: {error}", field) from error
