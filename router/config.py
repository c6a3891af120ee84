"""How the router chooses, waits and retries."""

from dataclasses import dataclass

LOCAL_PREFILL_MODES = ("auto", "never", "fallback")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Settings of one router."""

    local_prefill: str = "auto"  # auto: by cost; never: always a pair; fallback: when no pair lives
    max_waiting_requests: int | None = None  # None: 4 x the sum of max_num_seqs
    request_timeout_s: float = 600.0  # deadline of a request that brings none
    migration_limit: int = 3  # failures after admission one request may survive

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if self.local_prefill not in LOCAL_PREFILL_MODES:
            raise ValueError(
                f"Got {self.local_prefill = } but expected one of {LOCAL_PREFILL_MODES}"
            )
        if self.max_waiting_requests is not None and self.max_waiting_requests < 0:
            raise ValueError(f"Got {self.max_waiting_requests = } but expected None or at least 0")
        if not self.request_timeout_s > 0:
            raise ValueError(f"Got {self.request_timeout_s = } but expected a positive number")
        if self.migration_limit < 0:
            raise ValueError(f"Got {self.migration_limit = } but expected at least 0")
