"""How fast this engine is, learnt from every step."""

import time
from collections.abc import Callable

from engine.step_costs import StepCosts

_WEIGHT = 0.2  # of the newest observation
_MIN_CHUNK_TOKENS = 32  # smaller pieces say more about overhead than about speed


class Rates:
    """Owns the learnt speeds.

    A step costs what its decodes cost, at least as much as one (reading the weights is the same
    for any row), and its prompt tokens at `prefill_tokens_per_s` on top.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self.prefill_tokens_per_s = 0.0  # 0 = nothing observed yet
        self.step_costs = StepCosts()
        self._now = now
        self.learnt_at_s = now()  # when a prompt last taught `prefill_tokens_per_s`
        self._decode_step_s: dict[int, float] = {}  # by size class of the batch

    def decode_step_s(self, num_decodes: int) -> float:
        """Predicted seconds of a step with this many decodes; 0 when nothing was observed."""
        if not self._decode_step_s:
            return 0.0
        wanted = _size_class(num_decodes)
        nearest = min(self._decode_step_s, key=lambda known: abs(known - wanted))
        return self._decode_step_s[nearest]

    def predict_s(self, *, num_decodes: int, num_chunk_tokens: int) -> float:
        """Predicted seconds of a step; 0 when nothing was observed."""
        predicted_s = self.decode_step_s(num_decodes)
        if num_chunk_tokens and self.prefill_tokens_per_s:
            predicted_s += num_chunk_tokens / self.prefill_tokens_per_s
        return predicted_s

    def observe(
        self,
        *,
        num_decodes: int,
        num_chunk_tokens: int,
        duration_s: float,
        num_kv_tokens: int = 0,  # of the decodes
    ) -> None:
        """Learn from one step."""
        if num_chunk_tokens >= _MIN_CHUNK_TOKENS and duration_s > 0.0:
            rest_s = duration_s - self.decode_step_s(num_decodes)
            # A step faster than its decodes alone is noise; it must not become a huge rate.
            rate = num_chunk_tokens / max(rest_s, 0.25 * duration_s)
            self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, rate)
            self.learnt_at_s = self._now()
        elif num_decodes and not num_chunk_tokens:
            size = _size_class(num_decodes)
            self._decode_step_s[size] = _blend(self._decode_step_s.get(size, 0.0), duration_s)
            self.step_costs.observe(
                num_requests=num_decodes, num_kv_tokens=num_kv_tokens, duration_s=duration_s
            )

    def max_chunk_tokens(self, *, num_decodes: int, limit_s: float) -> int | None:
        """Prompt tokens that keep a step under `limit_s`; None when nothing was observed."""
        if not self.prefill_tokens_per_s:
            return None
        left_s = limit_s - self.decode_step_s(num_decodes)
        # Never so few that the fixed cost of a step eats the speed.
        return max(_MIN_CHUNK_TOKENS, int(left_s * self.prefill_tokens_per_s))


def _size_class(num_decodes: int) -> int:
    """1, 2, 3 to 4, 5 to 8, ... : within a class a step costs about the same."""
    return (max(1, num_decodes) - 1).bit_length()


def _blend(before: float, newest: float) -> float:
    return newest if not before else (1.0 - _WEIGHT) * before + _WEIGHT * newest
