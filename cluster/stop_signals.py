"""What SIGINT and SIGTERM do to `relevo serve`."""

import signal
import threading
from types import FrameType


class StopRequested(BaseException):
    """SIGINT or SIGTERM arrived; raised in the main thread, wherever it is."""


class StopSignals:
    """The first signal interrupts the main thread; once the stop has begun, one cuts it short."""

    def __init__(self) -> None:
        self.force = threading.Event()
        self._is_stopping = False

    def install(self) -> None:
        """Take both signals; to be repeated, since Ray installs handlers of its own."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def begin_stop(self) -> None:
        """From now on a signal does not interrupt, but sets `force`."""
        self._is_stopping = True
        self.install()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._is_stopping:
            self.force.set()
            return
        self._is_stopping = True
        raise StopRequested
