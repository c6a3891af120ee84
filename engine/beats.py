"""Signs of life of a thread, and how long others kept it from giving one."""

import os
import time
import weakref
from contextlib import suppress


class Beats:
    """`begin` and `beat` are for the thread itself, the rest for any."""

    def __init__(self) -> None:
        self._last = (time.monotonic(), 0.0)  # when, and how long it had waited by then
        self._schedstat: int | None = None

    def begin(self) -> None:
        """Take the calling thread; only Linux says how long one waits."""
        with suppress(OSError):
            self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            weakref.finalize(self, os.close, self._schedstat)

    def beat(self) -> None:
        """Show life."""
        self._last = (time.monotonic(), self._read_waited_s())

    def age_s(self) -> float:
        """Since the last one."""
        return max(0.0, time.monotonic() - self._last[0])

    def waited_s(self) -> float:
        """Since then, ready to run while others had the cores."""
        return max(0.0, self._read_waited_s() - self._last[1])

    def _read_waited_s(self) -> float:
        if self._schedstat is None:
            return 0.0
        try:
            _, waited_ns, _ = os.pread(self._schedstat, 96, 0).split()
        except OSError:
            return 0.0  # the thread has ended
        return int(waited_ns) / 1e9
