"""Carries what an engine says about itself from its thread to the event loop and the state feed."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from engine.load import BlockEvents, EngineLoad, StepOutput

REPORT_PERIOD_S = 0.1  # while nothing but the positions of running requests changes


class ReportingEngine(Protocol):
    """The engine's verbs used here; called on the engine's thread."""

    def drain_block_events(self) -> BlockEvents:
        """Changes since the last call."""

    def load(self) -> EngineLoad:
        """How busy it is."""


class EngineReporter:
    """Owns the last load of one engine. Invariant: block events keep the engine's order."""

    def __init__(
        self,
        engine: ReportingEngine,
        *,
        on_report: Callable[[BlockEvents], None],  # on the event loop; the load is new as well
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._on_report = on_report
        self._now = now
        self._event_loop = asyncio.get_running_loop()
        self._last_s = float("-inf")
        self.load = engine.load()

    def on_step(self, output: StepOutput) -> None:
        """Report after a turn if there is something worth saying; engine thread."""
        events = self._engine.drain_block_events()
        # A turn without a step only ran verbs, and those change who owns what.
        is_due = not output.stats.num_tokens or self._now() - self._last_s >= REPORT_PERIOD_S
        if events or is_due or any(each.finish_reason for each in output.outputs):
            self._report(events)

    def _report(self, events: BlockEvents) -> None:
        self._last_s = self._now()
        load = self._engine.load()
        try:
            self._event_loop.call_soon_threadsafe(self._take, load, events)
        except RuntimeError:
            # The loop is closed: the process ends, nobody listens.
            return

    def _take(self, load: EngineLoad, events: BlockEvents) -> None:
        self.load = load
        self._on_report(events)
