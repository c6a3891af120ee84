"""When a state stream speaks: soon after a change, not too often, and never silent for long."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedPace:
    """Settings of the rounds of a state stream."""

    min_interval_s: float = 0.05  # between rounds, however much changes
    max_interval_s: float = 1.0  # between rounds, however little changes
    metrics_interval_s: float = 1.0  # metric samples are many and few need them fresh
    now: Callable[[], float] = time.monotonic


class RoundTimer:
    """Tells one stream how long to wait for its next round. Invariant: the first is due at once."""

    def __init__(self, pace: FeedPace) -> None:
        self._pace = pace
        self._last_round_s = float("-inf")
        self._last_metrics_s = float("-inf")

    def wait_s(self, *, is_changed: bool) -> float:
        """Return seconds until the next round; 0 when it is due."""
        interval_s = self._pace.min_interval_s if is_changed else self._pace.max_interval_s
        return max(0.0, self._last_round_s + interval_s - self._pace.now())

    def start_round(self) -> bool:
        """Note that a round begins; True when it carries metric samples."""
        now = self._pace.now()
        self._last_round_s = now
        if now - self._last_metrics_s < self._pace.metrics_interval_s:
            return False
        self._last_metrics_s = now
        return True
