"""What makes a decode step longer, learnt from steps that differ: requests, and KV to read.

    duration ≈ fixed + request_s x requests + kv_token_s x tokens of their KV

A least-squares fit over exponentially forgotten moments; neither cost is ever negative, and what
never varied has none.
"""

from dataclasses import dataclass

_WEIGHT = 0.02  # of the newest step
_LONGEST_TIMES_MEAN = 4.0  # a step that was held up by others says nothing about its size
_LEAST_SHARE = 1e-6  # of the variances' product: below, two sizes only moved together


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    num_requests: float
    num_kv_tokens: float
    duration_s: float


class StepCosts:
    """Owns the moments."""

    def __init__(self) -> None:
        self._mean: _Step | None = None
        self._requests_2 = self._kv_2 = self._requests_kv = 0.0  # (co)variances
        self._requests_s = self._kv_s = 0.0  # with the duration

    def observe(self, *, num_requests: int, num_kv_tokens: int, duration_s: float) -> None:
        """Learn from one step that only decoded."""
        if self._mean is None:
            self._mean = _Step(
                num_requests=num_requests, num_kv_tokens=num_kv_tokens, duration_s=duration_s
            )
            return
        mean = self._mean
        requests = num_requests - mean.num_requests
        kv = num_kv_tokens - mean.num_kv_tokens
        seconds = min(duration_s, _LONGEST_TIMES_MEAN * mean.duration_s) - mean.duration_s
        self._requests_2 = _forget(self._requests_2, requests * requests)
        self._kv_2 = _forget(self._kv_2, kv * kv)
        self._requests_kv = _forget(self._requests_kv, requests * kv)
        self._requests_s = _forget(self._requests_s, requests * seconds)
        self._kv_s = _forget(self._kv_s, kv * seconds)
        self._mean = _Step(
            num_requests=mean.num_requests + _WEIGHT * requests,
            num_kv_tokens=mean.num_kv_tokens + _WEIGHT * kv,
            duration_s=mean.duration_s + _WEIGHT * seconds,
        )

    def marginal(self) -> tuple[float, float]:
        """Seconds one more request adds to a step, and one more token of KV; 0 while unknown."""
        requests_2, kv_2, both = self._requests_2, self._kv_2, self._requests_kv
        rest = requests_2 * kv_2 - both * both
        if rest > _LEAST_SHARE * requests_2 * kv_2:
            request_s = (self._requests_s * kv_2 - self._kv_s * both) / rest
            kv_token_s = (self._kv_s * requests_2 - self._requests_s * both) / rest
            if request_s >= 0.0 and kv_token_s >= 0.0:
                return request_s, kv_token_s
        # One of them explains it all: the one that does not run against the other.
        if requests_2 > 0.0 and self._requests_s >= 0.0:
            return self._requests_s / requests_2, 0.0
        return 0.0, max(self._kv_s / kv_2, 0.0) if kv_2 > 0.0 else 0.0


def _forget(before: float, newest: float) -> float:
    return (1.0 - _WEIGHT) * (before + _WEIGHT * newest)
