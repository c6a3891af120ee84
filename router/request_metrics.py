"""Writes down a request once it is over; exactly one counter names how it ended."""

from router.errors import NeverFits, NoWorkers, QueueFull
from router.report import RequestReport
from telemetry import metrics as names
from telemetry.metrics import Metrics

_REJECTED = {QueueFull: "queue_full", NoWorkers: "no_workers", NeverFits: "never_fits"}


class RequestMetrics:
    """The router's metrics; without a facade nothing is written."""

    def __init__(self, metrics: Metrics | None) -> None:
        self._metrics = metrics

    def tokens_arrived(self, num_tokens: int, since_last_s: float) -> None:
        """A step's tokens came this long after the ones before."""
        if self._metrics is not None:
            for _ in range(num_tokens):
                self._metrics.observe(names.INTER_TOKEN_LATENCY, since_last_s / num_tokens)

    def migrated(self, cause: str) -> None:
        """A request goes on elsewhere."""
        if self._metrics is not None:
            self._metrics.add(names.MIGRATIONS, cause=cause)

    def refused(self) -> None:
        """A request was refused before it was one, since too many are here."""
        if self._metrics is not None:
            self._metrics.add(names.ADMISSION_REJECTED, reason=_REJECTED[QueueFull])

    def ended(
        self, report: RequestReport, error: BaseException | None, num_predicted_tokens: int
    ) -> None:
        """A request is over."""
        if self._metrics is None:
            return
        if report.num_attempts == 0 and type(error) in _REJECTED:
            self._metrics.add(names.ADMISSION_REJECTED, reason=_REJECTED[type(error)])
            return
        self._metrics.add(names.REQUESTS_FINISHED, finish_reason=report.finish_reason)
        self._metrics.observe(names.REQUEST_DURATION, report.elapsed_s)
        if report.first_token_s is not None:
            self._first_token(self._metrics, report, num_predicted_tokens)

    @staticmethod
    def _first_token(metrics: Metrics, report: RequestReport, num_predicted_tokens: int) -> None:
        metrics.observe(names.TIME_TO_FIRST_TOKEN, report.first_token_s or 0.0)
        for part, seconds in report.first_token_parts.items():
            metrics.observe(names.TTFT_PART, seconds, part=part)
        if report.second_token_s is not None:
            for part, seconds in report.second_token_parts.items():
                metrics.observe(names.SECOND_TOKEN_PART, seconds, part=part)
        for source in ("computed", "cached_prefill", "cached_decode"):
            metrics.add(names.PROMPT_TOKENS, getattr(report, source), source=source)
        metrics.add(names.GENERATION_TOKENS, report.num_completion_tokens)
        predicted_error = num_predicted_tokens - report.cached_tokens
        metrics.observe(names.PREDICTED_CACHED_TOKENS_ERROR, predicted_error)
