"""What the faces need of a router, and no more."""

from collections.abc import Sequence
from typing import Protocol

from router.report import RequestReport
from router.request import FinishReason, LoadReport, ModelInfo, RoutedRequest, Tenant, TokenBatch


class UpstreamGeneration(Protocol):
    """One running request. Whoever started it must exhaust or close it."""

    @property
    def report(self) -> RequestReport:
        """What became of it so far."""
        ...

    def __aiter__(self) -> "UpstreamGeneration":
        """Iterate over the batches of tokens."""
        ...

    async def __anext__(self) -> TokenBatch:
        """Return the tokens of the next step; a router error ends it."""
        ...

    def gather(self, num_tokens: int) -> None:
        """Hand on no fewer tokens than these at once, but for the end of a choice."""
        ...

    def end_choice(self, choice_index: int) -> None:
        """End one choice everywhere: nothing more of it comes. Harmless when it has ended."""
        ...

    async def aclose(self, finish_reason: FinishReason | None = None) -> None:
        """Cancel it everywhere, from any task; a reader sees its end. Harmless when it has ended.

        A reason means that the reader had all it wanted.
        """
        ...


class Upstream(Protocol):
    """Runs requests on the workers."""

    @property
    def model(self) -> ModelInfo | None:
        """The served model; None before the first worker said hello."""
        ...

    def generate(self, request: RoutedRequest) -> UpstreamGeneration:
        """Start a request."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that wait for workers here."""
        ...

    def has_room(self, tenant: Tenant, priority: int) -> bool:
        """Tell whether a request of this tenant and priority need not be refused for the load."""
        ...

    def check_room(self, tenant: Tenant, priority: int) -> None:
        """QueueFull, which counts as a refusal, when it has to be."""
        ...

    def max_requests(self, num_choices: int) -> int:
        """Return how many requests of this many choices could run or wait at once, all alone."""
        ...

    def is_ready(self) -> bool:
        """Tell whether a choice of workers exists now."""
        ...

    def loads(self) -> Sequence[LoadReport]:
        """Return the last load of every live worker."""
        ...

    def status(self, num_routes: int = 0, *, tenant: str | None = None) -> dict[str, object]:
        """Return the body of /v1/status, with the last routing decisions, of one tenant or all."""
        ...
