"""Keeps the metrics of one process in a Prometheus registry of its own."""

import threading
from collections.abc import Mapping
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from telemetry import exposition
from telemetry.metrics import INSTRUMENT_BY_NAME, Instrument, InstrumentKind, Sample

MetricT = TypeVar("MetricT", Counter, Gauge, Histogram)


class PrometheusSink:
    """A MetricSink that can be read back. Two sinks in one process share nothing.

    A metric appears with its first value: a worker must not report the ingress's metrics as zero.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}

    def add(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Raise a counter by `value` >= 0."""
        self._series(name, Counter, labels).inc(value)

    def set(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Set a gauge."""
        self._series(name, Gauge, labels).set(value)

    def observe(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Put one value into a histogram."""
        self._series(name, Histogram, labels).observe(value)

    def _series(self, name: str, kind: type[MetricT], labels: Mapping[str, str]) -> MetricT:
        metric = self._metrics.get(name)
        if metric is None:
            with self._lock:
                metric = self._metrics.get(name) or self._register(INSTRUMENT_BY_NAME[name])
        if not isinstance(metric, kind):
            raise TypeError(f"Got a {kind.__name__} value for {name = }")
        return metric.labels(**labels) if labels else metric

    def _register(self, instrument: Instrument) -> Counter | Gauge | Histogram:
        name, text, labels = instrument.name, instrument.description, instrument.labels
        metric: Counter | Gauge | Histogram
        if instrument.kind is InstrumentKind.COUNTER:
            metric = Counter(name, text, labels, registry=self._registry)
        elif instrument.kind is InstrumentKind.GAUGE:
            metric = Gauge(name, text, labels, registry=self._registry)
        else:
            metric = Histogram(
                name, text, labels, registry=self._registry, buckets=instrument.buckets
            )
        self._metrics[name] = metric
        return metric

    def samples(self) -> list[Sample]:
        """Return every number, as a state stream carries them."""
        return [
            Sample(sample.name, dict(sample.labels), float(sample.value))
            for family in self._registry.collect()
            for sample in family.samples
            # When a series was born is no metric of ours and doubles the page.
            if not sample.name.endswith("_created")
        ]

    def render(self) -> bytes:
        """Return the page a Prometheus server scrapes."""
        return exposition.render(self.samples())
