"""One request as it will be sent: everything is decided before the first one leaves."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """What to send, when, and how its client behaves."""

    due_s: float  # since the phase's start; of no meaning to closed arrivals
    body: bytes  # JSON
    num_prompt_tokens: int  # as asked for; a server may count its template's too
    num_output_tokens: int
    group: str = ""  # whose latencies stand beside the others': a tenant, the slow readers
    headers: dict[str, str] = field(default_factory=dict)
    read_tokens_per_s: float | None = None  # null = as fast as they come
    cancel_after_tokens: int | None = None
    resends: bool = False  # asked again when it was cancelled
    retries: int = 0
