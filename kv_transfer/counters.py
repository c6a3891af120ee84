"""Counts that the two ends of the KV plane keep for their workers' metrics.

Cumulative since the process started; read by the worker, never reset.
"""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class SenderCounters:
    """Of a prefill worker."""

    leases_expired: int = 0
    # messages of an old epoch, generation or incarnation that changed nothing
    fenced_messages: int = 0


@dataclass(slots=True)
class ReceiverCounters:
    """Of a decode worker: each hand-over arrives or fails here once."""

    digest_mismatches: int = 0
    num_bytes: int = 0
    # by FailureReason
    failures: Counter[str] = field(default_factory=Counter)
