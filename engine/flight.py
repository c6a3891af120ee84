"""A step that was launched: what it runs, and how its results are read."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.request import Request, RequestStatus
from engine.schedule import Schedule, ScheduledRequest
from engine.step import RowResult

logger = logging.getLogger(__name__)

# What reads a launched step: waits until it is done, then a result for each entry, in order.
Reader = Callable[[], list[RowResult]]


@dataclass(slots=True, kw_only=True)
class Flight:
    """One launched step. The next one may be launched behind it before it has landed."""

    schedule: Schedule
    started_at_s: float
    predicted_s: float
    read: Reader
    # Where on the device the next one finds the token that each request samples; None when nothing
    # may be launched behind this step.
    pending_rows: Mapping[Request, int] | None = None
    has_failed: bool = False  # as a whole
    # Those for whom it ran on a token that turned out otherwise: it counts for nothing.
    mistaken: set[Request] = field(default_factory=set)

    def counts_for(self, request: Request) -> bool:
        """Whether its results mean anything to a request, once the step before has landed."""
        return request.status is not RequestStatus.FINISHED and request not in self.mistaken

    def results(self) -> list[RowResult]:
        """Wait until it is done; a result for each of its entries, in order."""
        try:
            return self.read()
        except Exception as error:
            logger.exception("a step with %d requests failed", len(self.schedule.scheduled))
            self.has_failed = True
            return failed_results(self.schedule, error)

    @property
    def live_rows(self) -> dict[Request, int]:
        """Where the tokens are that it samples and that mean something."""
        rows = self.pending_rows or {}
        return {request: row for request, row in rows.items() if self.counts_for(request)}

    @property
    def live_entries(self) -> list[ScheduledRequest]:
        """Its shares that still mean something."""
        return [entry for entry in self.schedule.scheduled if self.counts_for(entry.request)]


def failed_results(schedule: Schedule, error: Exception) -> list[RowResult]:
    """The same error for all that a step ran."""
    text = f"{type(error).__name__}: {error}"
    return [RowResult(entry=entry, error=text) for entry in schedule.scheduled]
