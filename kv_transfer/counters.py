"""Counts that one end of the KV plane keeps for the worker's metrics."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class TransferCounters:
    """Cumulative counts since the process started; read by the worker, never reset."""

    leases_expired: int = 0
    # messages of an old epoch, generation or incarnation that changed nothing
    fenced_messages: int = 0
    digest_mismatches: int = 0
    num_bytes: int = 0
    # by FailureReason
    failures: Counter[str] = field(default_factory=Counter)
