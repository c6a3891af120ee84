"""Every metric of the system as one table, and the facade through which the rooms write them."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

_LOGGER = logging.getLogger(__name__)

REQUESTS_RUNNING: Final = "relevo_requests_running"
REQUESTS_WAITING: Final = "relevo_requests_waiting"
REQUESTS_TRANSFERRING: Final = "relevo_requests_transferring"
KV_BLOCKS: Final = "relevo_kv_blocks"
KV_LEASES_OPEN: Final = "relevo_kv_leases_open"
KV_TRANSFER_BYTES: Final = "relevo_kv_transfer_bytes_total"
KV_TRANSFER_SECONDS: Final = "relevo_kv_transfer_seconds"
KV_TRANSFER_FAILURES: Final = "relevo_kv_transfer_failures_total"
KV_DIGEST_MISMATCHES: Final = "relevo_kv_digest_mismatches_total"
KV_FENCED_MESSAGES: Final = "relevo_kv_fenced_messages_total"
LEASE_EXPIRED: Final = "relevo_lease_expired_total"
PREEMPTIONS: Final = "relevo_preemptions_total"
REQUESTS_FINISHED: Final = "relevo_requests_finished_total"
TIME_TO_FIRST_TOKEN: Final = "relevo_time_to_first_token_seconds"
TTFT_PART: Final = "relevo_ttft_part_seconds"
SECOND_TOKEN_PART: Final = "relevo_second_token_part_seconds"
INTER_TOKEN_LATENCY: Final = "relevo_inter_token_latency_seconds"
REQUEST_DURATION: Final = "relevo_request_duration_seconds"
PROMPT_TOKENS: Final = "relevo_prompt_tokens_total"
GENERATION_TOKENS: Final = "relevo_generation_tokens_total"
MIGRATIONS: Final = "relevo_migrations_total"
ADMISSION_REJECTED: Final = "relevo_admission_rejected_total"
ROUTER_WAITING_REQUESTS: Final = "relevo_router_waiting_requests"
WORKERS: Final = "relevo_workers"
LINKS: Final = "relevo_links"
WORKERS_TARGET: Final = "relevo_workers_target"
WORKERS_DEMAND: Final = "relevo_workers_demand"
PREDICTED_CACHED_TOKENS_ERROR: Final = "relevo_predicted_cached_tokens_error"

# fmt: off
_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
                 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
                10.0, 20.0, 40.0, 80.0)
_DURATION_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
                     60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
_TRANSFER_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
                     30.0)
_TOKEN_ERROR_BUCKETS = (-4096.0, -1024.0, -256.0, -64.0, -1.0, 0.0, 64.0, 256.0, 1024.0, 4096.0)
# fmt: on


class InstrumentKind(StrEnum):
    """How values of an instrument add up."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instrument:
    """What one metric is."""

    name: str  # as exported, counters with their _total
    kind: InstrumentKind
    unit: str
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds without +Inf; histograms only


class Sample(NamedTuple):
    """One exported number; a histogram is several of them (_bucket with `le`, _sum, _count)."""

    name: str
    labels: dict[str, str]
    value: float


def _counter(name: str, unit: str, description: str, *labels: str) -> Instrument:
    return Instrument(
        name=name,
        kind=InstrumentKind.COUNTER,
        unit=unit,
        description=description,
        labels=labels,
    )


def _gauge(name: str, unit: str, description: str, *labels: str) -> Instrument:
    return Instrument(
        name=name, kind=InstrumentKind.GAUGE, unit=unit, description=description, labels=labels
    )


def _histogram(
    name: str, unit: str, description: str, buckets: tuple[float, ...], *labels: str
) -> Instrument:
    return Instrument(
        name=name,
        kind=InstrumentKind.HISTOGRAM,
        unit=unit,
        description=description,
        labels=labels,
        buckets=buckets,
    )


# A worker's series name their worker, so that an ingress can show those of all workers on one page.
_WORKER = ("pool", "worker")

# fmt: off
INSTRUMENTS: Final[tuple[Instrument, ...]] = (
    _gauge(REQUESTS_RUNNING, "requests", "Requests in the running batch", *_WORKER),
    _gauge(REQUESTS_WAITING, "requests", "Requests waiting for a place in the batch", *_WORKER),
    _gauge(REQUESTS_TRANSFERRING, "requests", "Requests whose KV is being handed over", *_WORKER),
    _gauge(KV_BLOCKS, "blocks", "KV blocks by state", *_WORKER, "state"),
    _gauge(KV_LEASES_OPEN, "leases", "Transfers whose KV is kept for a peer", *_WORKER),
    _counter(KV_TRANSFER_BYTES, "bytes", "Bytes of KV received from peers", *_WORKER),
    _histogram(KV_TRANSFER_SECONDS, "seconds", "First to last byte of one KV transfer",
               _TRANSFER_BUCKETS, *_WORKER),
    _counter(KV_TRANSFER_FAILURES, "transfers", "KV transfers that failed", *_WORKER, "reason"),
    _counter(KV_DIGEST_MISMATCHES, "chunks", "KV chunks whose digest did not match", *_WORKER),
    _counter(KV_FENCED_MESSAGES, "messages", "Stale messages refused", *_WORKER),
    _counter(LEASE_EXPIRED, "leases", "Transfers given up because their lease ran out", *_WORKER),
    _counter(PREEMPTIONS, "requests", "Requests evicted to be computed again", "worker"),
    _counter(REQUESTS_FINISHED, "requests", "Requests that ended", "finish_reason"),
    _histogram(TIME_TO_FIRST_TOKEN, "seconds", "Arrival to the first token", _TTFT_BUCKETS),
    _histogram(TTFT_PART, "seconds", "Parts of the time to the first token", _TTFT_BUCKETS, "part"),
    _histogram(SECOND_TOKEN_PART, "seconds", "Parts of the time from the first token to the second",
               _TTFT_BUCKETS, "part"),
    _histogram(INTER_TOKEN_LATENCY, "seconds", "Time between consecutive tokens", _ITL_BUCKETS),
    _histogram(REQUEST_DURATION, "seconds", "Arrival to the last token", _DURATION_BUCKETS),
    _counter(PROMPT_TOKENS, "tokens", "Prompt tokens by where their KV came from", "source"),
    _counter(GENERATION_TOKENS, "tokens", "Tokens sent to clients"),
    _counter(MIGRATIONS, "requests", "Requests continued on other workers", "cause"),
    _counter(ADMISSION_REJECTED, "requests", "Requests refused on arrival", "reason"),
    _gauge(ROUTER_WAITING_REQUESTS, "requests", "Requests that wait for workers in this ingress"),
    _gauge(WORKERS, "workers", "Workers as this ingress sees them", "pool", "state"),
    _gauge(LINKS, "links", "KV links as this ingress sees them", "state"),
    _gauge(WORKERS_TARGET, "workers", "Workers that autoscaling wants", "pool"),
    _gauge(WORKERS_DEMAND, "workers", "Workers that the present load would keep as busy as meant",
           "pool"),
    _histogram(PREDICTED_CACHED_TOKENS_ERROR, "tokens", "Cached tokens predicted minus found",
               _TOKEN_ERROR_BUCKETS),
)
# fmt: on

INSTRUMENT_BY_NAME: Final[Mapping[str, Instrument]] = {each.name: each for each in INSTRUMENTS}


class MetricSink(Protocol):
    """Where numbers go, from any thread. May raise.

    Names are those of INSTRUMENTS; labels are complete, and nobody changes them afterwards.
    """

    def add(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Raise a counter by `value` >= 0."""

    def set(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Set a gauge."""

    def observe(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Put one value into a histogram."""

    def flush(self) -> None:
        """Bring what was written so far where it goes; a sink that keeps nothing back is done."""


class Metrics:
    """What the rooms write metrics through. Invariant: no call ever raises into a request."""

    def __init__(self, sink: MetricSink, *, labels: Mapping[str, str] | None = None) -> None:
        self._sink = sink
        labels = labels or {}  # those of the process; an instrument takes the ones it has
        self._constant_labels = {
            each.name: {key: text for key, text in labels.items() if key in each.labels}
            for each in INSTRUMENTS
        }
        self._failed_names: set[str] = set()

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Raise a counter."""
        self._write(self._sink.add, name, value, labels)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._write(self._sink.set, name, value, labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Put one value into a histogram."""
        self._write(self._sink.observe, name, value, labels)

    def flush(self) -> None:
        """Bring everything written so far where it goes."""
        try:
            self._sink.flush()
        except Exception:
            _LOGGER.exception("Metrics could not be flushed")

    def _write(
        self,
        verb: Callable[[str, float, Mapping[str, str]], None],
        name: str,
        value: float,
        labels: dict[str, str],
    ) -> None:
        try:
            constant = self._constant_labels[name]
            verb(name, value, constant | labels if labels else constant)
        except Exception:
            # Once per name: a broken metric in the step loop must not flood the log either.
            if name not in self._failed_names:
                self._failed_names.add(name)
                _LOGGER.exception("Metric %s could not be written", name)
