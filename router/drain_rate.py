"""How fast the queue drains: the turns given lately, and what to tell those it refuses."""

from collections import deque

WINDOW_S = 10.0
MIN_TURNS = 4
SHORTEST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0


class DrainRate:
    """Remembers when turns were given while somebody waited; plain data, times from outside."""

    def __init__(self) -> None:
        self._turns: deque[float] = deque(maxlen=1024)

    def note_turn(self, now_s: float) -> None:
        """A waiting request got its choice."""
        self._turns.append(now_s)

    def wait_s(self, num_before: int, *, now_s: float, expected_turn_s: float) -> float:
        """Until this many got their turn; by `expected_turn_s` each while too few were seen."""
        while self._turns and self._turns[0] < now_s - WINDOW_S:
            self._turns.popleft()
        turn_s = expected_turn_s
        if len(self._turns) >= MIN_TURNS:
            turn_s = (now_s - self._turns[0]) / len(self._turns)
        return num_before * turn_s


def retry_after_s(wait_s: float) -> float:
    """The hint for who was refused: not at once, and not for ever."""
    return min(max(wait_s, SHORTEST_RETRY_S), LONGEST_RETRY_S)
