"""Asks discovery who should be alive: now and then, and often for a while after a change."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from router.discovery import Discovery
from rpc.description import WorkerDescription

STABLE_POLL_S = 2.0
FAST_POLL_S = 0.25
FAST_FOR_S = 5.0  # after a change or a broken stream
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
        self._fast_until_s = now() + FAST_FOR_S

    def look_again(self) -> None:
        """Something changed or failed: ask now, and often for a while."""
        self._fast_until_s = self._now() + FAST_FOR_S
        self._poll_now.set()

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            self._poll_now.clear()
            await self._poll()
            # Also the shortest pause: a burst of reports must not become a burst of polls.
            await asyncio.sleep(FAST_POLL_S)
            if self._now() < self._fast_until_s or self._is_in_need():
                continue
            try:
                async with asyncio.timeout(STABLE_POLL_S - FAST_POLL_S):
                    await self._poll_now.wait()
            except TimeoutError:
                continue

    async def _poll(self) -> None:
        try:
            async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                descriptions = await self._discovery.describe()
            self._apply(descriptions)
        except Exception:
            _LOGGER.warning("Discovery failed", exc_info=True)
