"""Event loops whose time does not pass by itself: no test of a timer has to wait, or to be quick.

When nothing is ready the time jumps to the next timer, so a pause of the machine is no pause of
the loop. Not for what works on other threads or behind sockets: nobody would wait for them.
"""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


class _NeverWaits(selectors.DefaultSelector):
    """Lets the time pass that it was asked to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "every task waits for something that no timer brings"
        ready = super().select(0)
        if not ready:
            self.now_s += max(timeout, 0.0)
        return ready


class FakeTimeLoop(asyncio.SelectorEventLoop):
    """Its `time` moves to the next timer, and when it is told to."""

    def __init__(self) -> None:
        self._clock = _NeverWaits()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass without a turn of the loop, as when something blocks it."""
        self._clock.now_s += seconds


def in_fake_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test on such a loop."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        with asyncio.Runner(loop_factory=FakeTimeLoop) as runner:
            runner.run(test(*arguments, **named))

    return run
