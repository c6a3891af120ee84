"""Keeps the metrics of one process as Prometheus metrics of its own."""

import threading
from collections.abc import Collection, Mapping
from typing import TypeVar

from prometheus_client import Counter, Gauge, Histogram

from telemetry import exposition
from telemetry.metrics import INSTRUMENT_BY_NAME, Instrument, InstrumentKind, Sample

MetricT = TypeVar("MetricT", Counter, Gauge, Histogram)


class PrometheusSink:
    """A MetricSink that can be read back. Two sinks in one process share nothing.

    A metric appears with its first value: a worker must not report the ingress's metrics as zero.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}
        # By name and labels: to find a series by its labels costs more than to raise it.
        self._known: dict[tuple[object, ...], Counter | Gauge | Histogram] = {}

    def add(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Raise a counter by `value` >= 0."""
        self._series(name, Counter, labels).inc(value)

    def set(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Set a gauge."""
        self._series(name, Gauge, labels).set(value)

    def observe(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Put one value into a histogram."""
        self._series(name, Histogram, labels).observe(value)

    def flush(self) -> None:
        """Nothing is kept back."""

    def _series(self, name: str, kind: type[MetricT], labels: Mapping[str, str]) -> MetricT:
        key = (name, *labels.items())
        series = self._known.get(key)
        if series is None:
            metric = self._metric(name)
            series = self._known[key] = metric.labels(**labels) if labels else metric
        if not isinstance(series, kind):
            raise TypeError(f"Got a {kind.__name__} value for {name = }")
        return series

    def _metric(self, name: str) -> Counter | Gauge | Histogram:
        with self._lock:
            return self._metrics.get(name) or self._register(INSTRUMENT_BY_NAME[name])

    def _register(self, instrument: Instrument) -> Counter | Gauge | Histogram:
        name, text, labels = instrument.name, instrument.description, instrument.labels
        metric: Counter | Gauge | Histogram
        if instrument.kind is InstrumentKind.COUNTER:
            metric = Counter(name, text, labels, registry=None)
        elif instrument.kind is InstrumentKind.GAUGE:
            metric = Gauge(name, text, labels, registry=None)
        else:
            metric = Histogram(name, text, labels, registry=None, buckets=instrument.buckets)
        self._metrics[name] = metric
        return metric

    def samples(self, names: Collection[str] | None = None) -> list[Sample]:
        """Return every number, as a state stream carries them; or those of some metrics only."""
        with self._lock:
            metrics = [
                metric for name, metric in self._metrics.items() if names is None or name in names
            ]
        return [
            Sample(sample.name, dict(sample.labels), float(sample.value))
            for metric in metrics
            for family in metric.collect()
            for sample in family.samples
            # When a series was born is no metric of ours and doubles the page.
            if not sample.name.endswith("_created")
        ]

    def render(self) -> bytes:
        """Return the page a Prometheus server scrapes."""
        return exposition.render(self.samples())
