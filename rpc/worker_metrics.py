"""The series of one worker: gauges set from its load, counters raised to others' totals."""

from collections.abc import Callable, Mapping

from relevo.v1 import state_pb2

from engine.load import EngineLoad
from telemetry import metrics
from telemetry.metrics import Metrics, MetricSink
from telemetry.prometheus_sink import PrometheusSink

WrapSink = Callable[[MetricSink], MetricSink]  # puts a second sink beside the first


class WorkerMetrics:
    """Owns the sink of one worker. Invariant: every series it reports names its worker."""

    def __init__(self, *, pool: str, worker_id: str, wrap_sink: WrapSink | None = None) -> None:
        self._sink = PrometheusSink()
        sink = wrap_sink(self._sink) if wrap_sink else self._sink
        self.worker_id = worker_id
        self._metrics = Metrics(sink, labels={"pool": pool, "worker": worker_id})
        self._told: dict[tuple[str, str], float] = {}  # the value of each gauge and counter
        self._samples: list[state_pb2.MetricSample] | None = None  # while nothing has changed

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        self._set(name, value, "", {})

    def observe(self, name: str, value: float) -> None:
        """Put one value into a histogram."""
        self._metrics.observe(name, value)
        self._samples = None

    def flush(self) -> None:
        """Bring what was written where it goes, before the worker ends."""
        self._metrics.flush()

    def raise_to(self, name: str, total: float) -> None:
        """Raise a counter to the total somebody else counted."""
        self._raise_to(name, total, "", {})

    def raise_each_to(self, name: str, label: str, totals: Mapping[str, float]) -> None:
        """Raise the counters of one metric, which differ in one label, to their totals."""
        for value, total in totals.items():
            self._raise_to(name, total, value, {label: value})

    def set_load(self, load: EngineLoad, *, num_transferring: int) -> None:
        """Set what an engine's load says."""
        self.set(metrics.REQUESTS_RUNNING, load.num_running)
        self.set(metrics.REQUESTS_WAITING, load.num_waiting)
        self.set(metrics.REQUESTS_TRANSFERRING, num_transferring)
        self.raise_to(metrics.PREEMPTIONS, load.num_preemptions)
        for state in ("free", "cached", "used", "held", "quarantined"):
            self._set(metrics.KV_BLOCKS, getattr(load.blocks, state), state, {"state": state})

    def samples(self) -> list[state_pb2.MetricSample]:
        """Every series of this worker; the same list for as long as nothing changes."""
        if self._samples is None:
            self._samples = [
                state_pb2.MetricSample(name=each.name, labels=each.labels, value=each.value)
                for each in self._sink.samples()
                # The sink also holds the ingress's series, all 0 here.
                if "worker" in each.labels
            ]
        return self._samples

    def _set(self, name: str, value: float, key: str, labels: dict[str, str]) -> None:
        if self._told.get((name, key)) != value:
            self._told[name, key] = value
            self._metrics.set(name, value, **labels)
            self._samples = None

    def _raise_to(self, name: str, total: float, key: str, labels: dict[str, str]) -> None:
        gain = total - self._told.get((name, key), 0.0)
        if gain > 0 or (name, key) not in self._told:
            self._told[name, key] = total
            self._metrics.add(name, max(0.0, gain), **labels)
            self._samples = None
