"""Simulated time: what is to happen, in order. Nothing waits, time jumps to the next event."""

import heapq
import itertools
from collections.abc import Callable


class Agenda:
    """Owns the clock and all that is planned. Invariant: time never goes back."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()  # events of one moment happen in the order of planning

    def now(self) -> float:
        """The clock that the router's code is given."""
        return self.now_s

    def at(self, time_s: float, happen: Callable[[], None]) -> None:
        """Plan an event; one in the past happens now."""
        heapq.heappush(self._planned, (max(time_s, self.now_s), next(self._numbers), happen))

    def after(self, delay_s: float, happen: Callable[[], None]) -> None:
        """Plan an event that far ahead."""
        self.at(self.now_s + delay_s, happen)

    def run(self, is_over: Callable[[], bool], *, until_s: float = float("inf")) -> None:
        """Let things happen until all is over, nothing is planned, or the time is up."""
        planned = self._planned
        while planned and not is_over() and planned[0][0] <= until_s:
            self.now_s, _, happen = heapq.heappop(planned)
            happen()
