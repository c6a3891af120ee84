"""Keeps the metrics of one process in a Prometheus registry of its own."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from telemetry import exposition
from telemetry.metrics import INSTRUMENTS, Instrument, InstrumentKind, Sample


class PrometheusSink:
    """A MetricSink that can be read back. Two sinks in one process share nothing."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for instrument in INSTRUMENTS:
            self._register(instrument)

    def _register(self, instrument: Instrument) -> None:
        name, text, labels = instrument.name, instrument.description, instrument.labels
        if instrument.kind is InstrumentKind.COUNTER:
            self._counters[name] = Counter(name, text, labels, registry=self._registry)
        elif instrument.kind is InstrumentKind.GAUGE:
            self._gauges[name] = Gauge(name, text, labels, registry=self._registry)
        else:
            self._histograms[name] = Histogram(
                name, text, labels, registry=self._registry, buckets=instrument.buckets
            )

    def add(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Raise a counter by `value` >= 0."""
        counter = self._counters[name]
        (counter.labels(**labels) if labels else counter).inc(value)

    def set(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Set a gauge."""
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set(value)

    def observe(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Put one value into a histogram."""
        histogram = self._histograms[name]
        (histogram.labels(**labels) if labels else histogram).observe(value)

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
