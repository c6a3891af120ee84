"""A router that answers at once: what remains of a request's cost is the faces' own."""

import asyncio
from collections.abc import Sequence

from router.report import RequestReport
from router.request import FinishReason, LoadReport, ModelInfo, RoutedRequest, Tenant, TokenBatch


class ScriptedGeneration:
    """Gives one token a step until max_tokens."""

    def __init__(self, request: RoutedRequest, token_ids: Sequence[int], step_s: float) -> None:
        self._request = request
        self._token_ids = token_ids
        self._step_s = step_s
        self._num_tokens = 0
        self._is_closed = False

    @property
    def report(self) -> RequestReport:
        """What became of it so far."""
        return RequestReport(
            request_id=self._request.request_id, num_prompt_tokens=len(self._request.token_ids)
        )

    def __aiter__(self) -> "ScriptedGeneration":
        return self

    async def __anext__(self) -> TokenBatch:
        if self._is_closed:
            raise StopAsyncIteration
        await asyncio.sleep(self._step_s)
        token_id = self._token_ids[self._num_tokens % len(self._token_ids)]
        self._num_tokens += 1
        is_last = self._num_tokens >= self._request.sampling.max_tokens
        return TokenBatch([token_id], FinishReason.LENGTH if is_last else None)

    def gather(self, num_tokens: int) -> None:
        """Each step is handed on all the same."""

    def end_choice(self, choice_index: int) -> None:  # noqa: ARG002
        """There is one choice only."""
        self._is_closed = True

    async def aclose(self, finish_reason: FinishReason | None = None) -> None:  # noqa: ARG002
        """End it."""
        self._is_closed = True


class ScriptedUpstream:
    """Repeats the same tokens for everybody."""

    def __init__(self, token_ids: Sequence[int], *, model_id: str, step_s: float) -> None:
        self.token_ids = token_ids
        self._step_s = step_s
        self.model: ModelInfo | None = ModelInfo(
            model_id=model_id,
            model_revision="",
            dtype="float32",
            max_model_len=131_072,
            block_size=32,
            max_num_seqs=256,
        )

    def generate(self, request: RoutedRequest) -> ScriptedGeneration:
        """Start a request."""
        return ScriptedGeneration(request, self.token_ids, self._step_s)

    @property
    def num_waiting(self) -> int:
        """Nobody waits."""
        return 0

    def has_room(self, tenant: Tenant, priority: int) -> bool:  # noqa: ARG002
        """Tell whether a request of this tenant and priority need not be refused for the load."""
        return True

    def check_room(self, tenant: Tenant, priority: int) -> None:
        """There is."""

    def max_requests(self, num_choices: int) -> int:  # noqa: ARG002
        """Tell of more than any measurement sends."""
        return 10_000

    def is_ready(self) -> bool:
        """Tell that it is."""
        return True

    def loads(self) -> list[LoadReport]:
        """There are no workers."""
        return []

    def status(self, num_routes: int = 0, *, tenant: str | None = None) -> dict[str, object]:  # noqa: ARG002
        """Say as little."""
        return {"state": "ready", "reasons": [], "workers": []}
