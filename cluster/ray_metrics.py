"""Sends our metrics through Ray's metrics agent, where they appear with `ray_` in front.

To write a number to Ray costs more than all else that is done for a token's metrics. So who writes
only notes it; a second later a thread of this module hands on what was noted: a counter's gains as
one, of each gauge the last value, and each value of a histogram, since Ray takes them one by one.

Ray sends a gauge on once for each time it was set, every ten seconds, and forgets it: so they are
all set again in between, also while nothing changes.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from ray.util.metrics import Counter, Gauge, Histogram

from telemetry.metrics import INSTRUMENT_BY_NAME, Instrument, InstrumentKind, MetricSink

PERIOD_S: Final = 1.0
REPEAT_S: Final = 5.0  # half of what Ray takes between two reports

Write = Callable[[float, dict[str, str]], None]
MakeWrite = Callable[[Instrument], Write]
_Series = tuple[str, tuple[tuple[str, str], ...]]  # name and labels

_LOGGER = logging.getLogger(__name__)


class RaySink:
    """A MetricSink over ray.util.metrics; a metric is registered with its first value.

    Invariant: each gain and each value of a histogram reaches Ray once, within a second of `start`
    or with `flush`, and so does each change of a gauge unless another one follows.
    """

    def __init__(
        self,
        make_write: MakeWrite | None = None,
        *,
        period_s: float = PERIOD_S,
        repeat_s: float = REPEAT_S,
    ) -> None:
        self._make_write = make_write or write_to_ray
        self._period_s = period_s
        self._repeat_s = repeat_s
        self._gauges: dict[_Series, float] = {}
        # Appending to a deque and taking from it need no lock.
        self._noted: deque[tuple[str, float, Mapping[str, str]]] = deque()
        self._has_noted = threading.Event()
        self._handing_on = threading.Lock()
        self._writes: dict[str, Write] = {}
        self._failed_names: set[str] = set()

    def start(self) -> None:
        """Hand on from now on; the thread waits while there is nothing."""
        threading.Thread(target=self._run, name="ray-metrics", daemon=True).start()

    def add(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Raise a counter."""
        self._note(name, value, labels)

    def set(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Set a gauge."""
        series = (name, tuple(labels.items()))
        if self._gauges.get(series) != value:
            self._gauges[series] = value
            self._has_noted.set()

    def observe(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Put one value into a histogram."""
        self._note(name, value, labels)

    def flush(self) -> None:
        """Hand on everything that was noted so far; returns when Ray has it."""
        with self._handing_on:
            gains: dict[_Series, float] = {}
            for _ in range(len(self._noted)):
                name, value, labels = self._noted.popleft()
                series = (name, tuple(labels.items()))
                if INSTRUMENT_BY_NAME[name].kind is InstrumentKind.COUNTER:
                    gains[series] = gains.get(series, 0.0) + value
                else:
                    self._hand_on(series, value)
            # A copy, made at once: meanwhile others may set a new one.
            for series, value in (gains | self._gauges).items():
                self._hand_on(series, value)

    def _note(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        self._noted.append((name, value, labels))
        if not self._has_noted.is_set():
            self._has_noted.set()

    def _run(self) -> None:
        while True:
            if self._has_noted.wait(self._repeat_s):
                time.sleep(self._period_s)
            # Before the flush: what is noted meanwhile wakes the thread again.
            self._has_noted.clear()
            self.flush()

    def _hand_on(self, series: _Series, value: float) -> None:
        name, labels = series
        try:
            if name not in self._writes:
                self._writes[name] = self._make_write(INSTRUMENT_BY_NAME[name])
            self._writes[name](value, dict(labels))
        except Exception:
            # Once per name, and the others go on.
            if name not in self._failed_names:
                self._failed_names.add(name)
                _LOGGER.exception("Metric %s could not be written to Ray", name)


def write_to_ray(instrument: Instrument) -> Write:
    """Register a metric with Ray and return how to write to it."""
    arguments: dict[str, Any] = {
        "description": instrument.description,
        "tag_keys": instrument.labels,
    }
    match instrument.kind:
        case InstrumentKind.COUNTER:
            counter = Counter(instrument.name, **arguments)

            def add(value: float, labels: dict[str, str]) -> None:
                if value > 0:  # Ray takes no zero
                    counter.inc(value, tags=labels)

            return add
        case InstrumentKind.GAUGE:
            return Gauge(instrument.name, **arguments).set
        case InstrumentKind.HISTOGRAM:
            # Ray refuses bounds that are not positive; what lies below falls into the first bucket.
            bounds = [bound for bound in instrument.buckets if bound > 0]
            return Histogram(instrument.name, boundaries=bounds, **arguments).observe


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

    def flush(self) -> None:
        """Flush both."""
        for sink in self._sinks:
            sink.flush()


def with_ray_sink(sink: MetricSink) -> MetricSink:
    """The same sink, and Ray's beside it."""
    ray_sink = RaySink()
    ray_sink.start()
    return TeeSink(sink, ray_sink)
