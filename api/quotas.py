"""How much one API key may ask for: requests and tokens a minute, refilled all the time.

A minute's worth may be spent at once. Prompts are charged when a request starts, its output when it
ends; a bucket may go below zero by what ran meanwhile, and then refuses until that is paid back.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from api.errors import ApiError, Verdict

_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What one key may use."""

    requests_per_minute: float = math.inf
    tokens_per_minute: float = math.inf  # of prompts and completions together


class _Bucket:
    """Holds up to a minute's worth of one thing. Invariant: never more than that."""

    def __init__(self, name: str, per_minute: float, *, now_s: float) -> None:
        self._name = name
        self._per_minute = per_minute
        self._left = per_minute
        self._counted_at_s = now_s

    def check(self, now_s: float) -> None:
        """ApiError unless one may be spent now."""
        # A quota below one a minute must not shut the key out for good.
        missing = min(1.0, self._per_minute) - self._refilled(now_s)
        if missing > 0:
            raise ApiError(
                Verdict.QUOTA_EXCEEDED,
                f"This API key has used up its {self._name} of {self._per_minute:g}; "
                "try again later",
                retry_after_s=missing * _MINUTE_S / self._per_minute,
            )

    def take(self, amount: float, now_s: float) -> None:
        """Spend it, also what is not there."""
        self._left = self._refilled(now_s) - amount

    def _refilled(self, now_s: float) -> float:
        if not math.isinf(self._per_minute):
            refill = (now_s - self._counted_at_s) * self._per_minute / _MINUTE_S
            self._left = min(self._per_minute, self._left + max(refill, 0.0))
        self._counted_at_s = now_s
        return self._left


class Allowance:
    """Owns what one key has left. Use it on one event loop."""

    def __init__(self, quota: Quota, *, now: Callable[[], float] = time.monotonic) -> None:
        self.quota = quota
        self._now = now
        self._requests = _Bucket("requests_per_minute", quota.requests_per_minute, now_s=now())
        self._tokens = _Bucket("tokens_per_minute", quota.tokens_per_minute, now_s=now())

    def admit(self) -> None:
        """Count one call; ApiError with the time to wait when the key has used its quota up."""
        now_s = self._now()
        self._requests.check(now_s)
        self._tokens.check(now_s)
        self._requests.take(1.0, now_s)

    def charge(self, num_tokens: int) -> None:
        """Count tokens that were used."""
        self._tokens.take(num_tokens, self._now())


UNLIMITED = Allowance(Quota())
