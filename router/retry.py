"""How often a request may start again, and how long it pauses before it does."""

import copy
import random
from dataclasses import dataclass, field

from router.config import RouterConfig
from router.errors import GenerationFailed
from router.retry_quota import RetryQuota
from router.worker_view import WorkerKey

MAX_UNREACHED = 20  # attempts in a row that no worker admitted and none refused as full
FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 0.5
LINK_PAUSE_S = 0.1
# The worker lives and answers, so others may get the same answer: such a retry costs the quota.
ANSWERED_CAUSES = frozenset({"error", "gap"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an attempt ended without a finish."""

    cause: str  # a short label: refused, stale, unreachable, lost, transfer, error, ...
    message: str
    was_admitted: bool
    workers: frozenset[WorkerKey] = field(default_factory=frozenset)  # those that failed


class RetryBudget:
    """Counts the failures of one request, so that a poison one ends after migration_limit."""

    def __init__(self, config: RouterConfig, rng: random.Random, quota: RetryQuota) -> None:
        self._limit = config.migration_limit
        self._rng = rng
        self._quota = quota
        quota.note_request()
        self._num_unreached = 0
        self._num_not_admitted = 0
        # Shared by the choices of a request: a poison one must not take a worker for each of them.
        self._failed_workers: set[WorkerKey] = set()
        self._num_lost = 0  # workers, with whatever else they ran
        self.num_failures = 0
        self.excluded: frozenset[WorkerKey] = frozenset()

    def fork(self) -> "RetryBudget":
        """Return the budget of a choice that goes on alone: its failures so far, and its own."""
        return copy.copy(self)  # the set stays one

    @property
    def is_suspect(self) -> bool:
        """Whether so many workers were lost that it may be the one that ends them."""
        return self._num_lost >= max(self._limit - 1, 1)

    def spend(self, failure: Failure, *, is_charged: bool = True) -> float:
        """Return the pause before the next attempt; GenerationFailed when none is left."""
        if failure.cause != "refused":
            self.excluded |= failure.workers
        if failure.cause == "migrate":
            self._num_not_admitted = self._num_unreached = 0
            return 0.0
        if failure.was_admitted:
            if is_charged:
                self._spend_failure(failure)
            if failure.cause in ANSWERED_CAUSES:
                return self._pause_s(self.num_failures)
            # News of a broken link takes a moment to come.
            return LINK_PAUSE_S if failure.cause == "transfer" else 0.0
        # A full worker may stay full for long, and the deadline ends that; an unreachable one not.
        self._num_not_admitted += 1
        self._num_unreached += failure.cause != "refused"
        if self._num_unreached > MAX_UNREACHED:
            raise GenerationFailed(f"no worker could be reached: {failure.message}")
        return self._pause_s(self._num_not_admitted)

    def _pause_s(self, num_tries: int) -> float:
        """Longer with each try, and never the same for two requests."""
        longest_s = min(FIRST_PAUSE_S * 2.0 ** min(num_tries - 1, 16), LONGEST_PAUSE_S)
        return longest_s * (0.5 + self._rng.random() / 2)

    def _spend_failure(self, failure: Failure) -> None:
        self._num_not_admitted = self._num_unreached = 0
        self.num_failures += 1
        self._num_lost += failure.cause == "lost"
        self._failed_workers |= failure.workers
        num_failures = max(self.num_failures, len(self._failed_workers))
        if num_failures > self._limit:
            raise GenerationFailed(
                f"{num_failures} workers failed in a row, the last: {failure.message}"
            )
        if failure.cause in ANSWERED_CAUSES and not self._quota.take():
            raise GenerationFailed(f"too many requests are retried already: {failure.message}")
