"""How fast this engine is, learnt from every step."""

_WEIGHT = 0.2  # of the newest observation
_MIN_CHUNK_TOKENS = 16  # smaller pieces say more about overhead than about speed
_MIN_DECODE_SHARE_S = 1e-6


class Rates:
    """Owns the learnt speeds: prompt tokens per second, and seconds of a decode step by size."""

    def __init__(self) -> None:
        self.prefill_tokens_per_s = 0.0  # 0 = nothing observed yet
        self._decode_step_s: dict[int, float] = {}  # by size class of the batch

    def decode_step_s(self, num_decodes: int) -> float:
        """Predicted seconds of a step with this many decodes; 0 when nothing was observed."""
        if not num_decodes or not self._decode_step_s:
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

    def observe(self, *, num_decodes: int, num_chunk_tokens: int, duration_s: float) -> None:
        """Learn from one step."""
        if num_chunk_tokens >= _MIN_CHUNK_TOKENS:
            rest_s = duration_s - self.decode_step_s(num_decodes)
            # A step faster than its decodes alone is noise; it still bounds the rate from below.
            rate = num_chunk_tokens / max(rest_s, 0.25 * duration_s, _MIN_DECODE_SHARE_S)
            self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, rate)
        elif num_decodes and not num_chunk_tokens:
            size = _size_class(num_decodes)
            self._decode_step_s[size] = _blend(self._decode_step_s.get(size, 0.0), duration_s)

    def max_chunk_tokens(self, *, num_decodes: int, limit_s: float) -> int | None:
        """Prompt tokens that keep a step under `limit_s`; None when nothing was observed."""
        if not self.prefill_tokens_per_s:
            return None
        left_s = limit_s - self.decode_step_s(num_decodes)
        return max(_MIN_CHUNK_TOKENS, int(left_s * self.prefill_tokens_per_s))


def _size_class(num_decodes: int) -> int:
    """1, 2, 3 to 4, 5 to 8, ... : within a class a step costs about the same."""
    return (num_decodes - 1).bit_length()


def _blend(before: float, newest: float) -> float:
    return newest if not before else (1.0 - _WEIGHT) * before + _WEIGHT * newest
