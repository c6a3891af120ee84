"""The page a Prometheus server scrapes: this ingress's own numbers and those the workers report."""

from collections.abc import Iterable, Sequence

from router.request import LoadReport
from telemetry import exposition
from telemetry.metrics import Sample
from telemetry.prometheus_sink import PrometheusSink

CONTENT_TYPE = exposition.CONTENT_TYPE


def metrics_page(sink: PrometheusSink, reports: Sequence[LoadReport]) -> bytes:
    """Render everything as one page, each metric's family in one place."""
    return exposition.render([*sink.samples(), *_worker_samples(reports)])


def _worker_samples(reports: Sequence[LoadReport]) -> Iterable[Sample]:
    for report in reports:
        for metric in report.load.metrics:
            yield Sample(metric.name, dict(metric.labels), metric.value)
