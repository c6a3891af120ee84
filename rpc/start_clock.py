"""Where the time of a worker's start goes."""

import time
from collections.abc import Callable


class StartClock:
    """Owns the parts of one start. Invariant: they add up to the time since it was made."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lap_s = now()
        self._parts_s: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """What went on since the last lap is over."""
        now_s = self._now()
        self._parts_s[part] = self._parts_s.get(part, 0.0) + now_s - self._lap_s
        self._lap_s = now_s

    @property
    def parts_s(self) -> dict[str, float]:
        """Seconds of each part, in order."""
        return dict(self._parts_s)


def describe_parts(parts_s: dict[str, float]) -> str:
    """Such as `5.3 s: imports 3.1, weights 0.4, warm_up 1.8`."""
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts_s.items())
    return f"{sum(parts_s.values()):.1f} s: {parts}"
