"""Finds stop strings in streamed text and holds back what could still become one."""

from collections.abc import Sequence


class StopStrings:
    """Owns the text not yet released.

    Invariant: no released text is part of a stop string, unless it is to be shown.

    The stop that is complete first wins, so the result does not depend on how the text was cut.
    """

    def __init__(self, stops: Sequence[str], *, is_stop_shown: bool = False) -> None:
        self._stops = tuple(stops)
        self._is_stop_shown = is_stop_shown
        self._held = ""
        self.found: str | None = None  # the stop that ended the text

    @property
    def stopped(self) -> bool:
        """Whether the text is over."""
        return self.found is not None

    def push(self, text: str) -> str:
        """Take new text and return what may be shown; `stopped` tells whether it is the end."""
        assert not self.stopped, "text came after the stop"
        if not self._stops:
            return text
        text = self._held + text
        self._held = ""
        cut = self._first_stop(text)
        if cut is not None:
            return text[:cut]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Return what was held back: the text is over and no stop came of it."""
        text, self._held = self._held, ""
        return text

    def _first_stop(self, text: str) -> int | None:
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if not found:
            return None
        end, start, self.found = min(found)
        return end if self._is_stop_shown else start

    def _num_held(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while start >= 0:
                if stop.startswith(text[start:]):
                    longest = max(longest, len(text) - start)
                    break
                start = text.find(stop[0], start + 1)
        return longest
