"""Stand-ins shared by the tests of several rooms."""


class FakeClock:
    """A monotonic clock that moves only when told; hand it in as `now`."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        assert seconds >= 0.0, "a monotonic clock never goes back"
        self._now_s += seconds
