"""What one operation of a link did, for the spans of the worker that took part in it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedRange:
    """Tokens [token_start, token_end) that were sent or received; times on one monotonic clock."""

    token_start: int
    token_end: int
    backend: str
    num_bytes: int
    # of this side's pool that hold a part of it
    num_blocks: int
    # decode side: from asking to the grant; prefill side: from the grant to its turn on the link
    ticket_wait_s: float
    started_at: float
    ended_at: float
