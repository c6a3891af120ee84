"""Sends our metrics through Ray's metrics agent, where they appear with `ray_` in front."""

import threading
from collections.abc import Mapping
from typing import Any, TypeVar

from ray.util.metrics import Counter, Gauge, Histogram

from telemetry.metrics import INSTRUMENT_BY_NAME, Instrument, InstrumentKind, MetricSink

MetricT = TypeVar("MetricT", Counter, Gauge, Histogram)


class RaySink:
    """A MetricSink over ray.util.metrics; a metric is registered with its first value."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}

    def add(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Raise a counter; Ray takes no zero."""
        if value > 0:
            self._get(self._counters, name, Counter).inc(value, tags=dict(labels))

    def set(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Set a gauge."""
        self._get(self._gauges, name, Gauge).set(value, tags=dict(labels))

    def observe(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Put one value into a histogram."""
        self._get(self._histograms, name, Histogram).observe(value, tags=dict(labels))

    def _get(self, metrics: dict[str, MetricT], name: str, kind: type[MetricT]) -> MetricT:
        with self._lock:
            if name not in metrics:
                instrument = INSTRUMENT_BY_NAME[name]
                metrics[name] = kind(
                    name,
                    description=instrument.description,
                    tag_keys=instrument.labels,
                    **_bounds(instrument),
                )
            return metrics[name]


def _bounds(instrument: Instrument) -> dict[str, Any]:
    if instrument.kind is not InstrumentKind.HISTOGRAM:
        return {}
    # Ray refuses bounds that are not positive; what lies below falls into the first bucket.
    return {"boundaries": [bound for bound in instrument.buckets if bound > 0]}


class TeeSink:
    """A MetricSink that writes to two."""

    def __init__(self, first: MetricSink, second: MetricSink) -> None:
        self._sinks = (first, second)

    def add(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Raise a counter."""
        for sink in self._sinks:
            sink.add(name, value, labels)

    def set(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Set a gauge."""
        for sink in self._sinks:
            sink.set(name, value, labels)

    def observe(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Put one value into a histogram."""
        for sink in self._sinks:
            sink.observe(name, value, labels)


def with_ray_sink(sink: MetricSink) -> MetricSink:
    """The same sink, and Ray's beside it."""
    return TeeSink(sink, RaySink())
