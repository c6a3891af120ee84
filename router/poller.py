"""Asks discovery who should be alive: often after a change, rarely once all has settled.

Each question costs every worker a call. A worker that is lost is noticed by its own stream; one
that nothing announces is found a settled pause late.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from router.discovery import Discovery
from rpc.description import WorkerDescription

FAST_POLL_S = 0.25
FAST_FOR_S = 5.0  # after a change or a broken stream
POLL_S = 2.0
SETTLED_AFTER_S = 30.0  # those who start together, or after one another, are there by then
SETTLED_POLL_S = 10.0
DESCRIBE_TIMEOUT_S = 5.0

_LOGGER = logging.getLogger(__name__)


class DiscoveryPoller:
    """Calls `apply` with each answer; an error of either leaves what is known in use."""

    def __init__(
        self,
        discovery: Discovery,
        *,
        apply: Callable[[Sequence[WorkerDescription]], None],
        is_in_need: Callable[[], bool],  # then it keeps asking often
        now: Callable[[], float],
    ) -> None:
        self._discovery = discovery
        self._apply = apply
        self._is_in_need = is_in_need
        self._now = now
        self._poll_now = asyncio.Event()
        self._changed_at_s = now()

    def look_again(self) -> None:
        """Something changed or failed: ask now, and often for a while."""
        self._changed_at_s = self._now()
        self._poll_now.set()

    def expect_change(self) -> None:
        """Nothing has settled: somebody starts and stops workers."""
        self._changed_at_s = max(self._changed_at_s, self._now() - FAST_FOR_S)

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            self._poll_now.clear()
            await self._poll()
            # Also the shortest pause: a burst of reports must not become a burst of polls.
            await asyncio.sleep(FAST_POLL_S)
            pause_s = FAST_POLL_S
            if not self._is_in_need():
                pause_s = pause_after(self._now() - self._changed_at_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s - FAST_POLL_S):
                    await self._poll_now.wait()

    async def _poll(self) -> None:
        try:
            async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                descriptions = await self._discovery.describe()
            self._apply(descriptions)
        except Exception:
            _LOGGER.warning("Discovery failed", exc_info=True)


def pause_after(quiet_s: float) -> float:
    """Seconds to the next question when nothing changed for `quiet_s`."""
    if quiet_s < FAST_FOR_S:
        return FAST_POLL_S
    return POLL_S if quiet_s < SETTLED_AFTER_S else SETTLED_POLL_S
