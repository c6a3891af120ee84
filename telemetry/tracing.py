"""Spans and W3C trace context of this process.

One tracer provider per process: whoever set one first (Ray Serve may) keeps it and we add our
exporter to it. Without a collector spans are still made, so that `traceparent` travels on.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from telemetry.config import TelemetryConfig

_TRACER_NAME = "relevo"
_MAX_QUEUED_SPANS = 4096
_MAX_BATCH_SPANS = 512
_EXPORT_INTERVAL_MS = 1000.0
_EXPORT_TIMEOUT_S = 3
_PROPAGATOR = TraceContextTextMapPropagator()

_lock = threading.Lock()
_exporting: dict[str, BatchSpanProcessor] = {}  # endpoint -> the processor that exports to it


def set_up_tracing(service_name: str, config: TelemetryConfig) -> None:
    """Make this process's spans go where `config` says; repeating it changes nothing."""
    with _lock:
        provider = trace.get_tracer_provider()
        if not isinstance(provider, TracerProvider):
            provider = TracerProvider(
                sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
                resource=Resource.create({"service.name": service_name}),
                # The SDK's own exit hook may wait much longer for a dead collector than we allow.
                shutdown_on_exit=False,
            )
            trace.set_tracer_provider(provider)
        if config.otlp_endpoint and config.otlp_endpoint not in _exporting:
            processor = _exporting_processor(config.otlp_endpoint)
            _exporting[config.otlp_endpoint] = processor
            provider.add_span_processor(processor)


def _exporting_processor(endpoint: str) -> BatchSpanProcessor:
    exporter = OTLPSpanExporter(
        endpoint=endpoint,
        insecure=not endpoint.startswith("https://"),
        timeout=_EXPORT_TIMEOUT_S,
    )
    return BatchSpanProcessor(
        exporter,
        max_queue_size=_MAX_QUEUED_SPANS,
        max_export_batch_size=_MAX_BATCH_SPANS,
        schedule_delay_millis=_EXPORT_INTERVAL_MS,
    )


def shut_down(timeout_s: float = 5.0) -> None:
    """Send what is queued and stop; gives up after `timeout_s` if the collector is dead."""
    with _lock:
        processors = list(_exporting.values())
        _exporting.clear()
    threads = [
        # Daemon: a collector that never answers must not hold the process back either.
        threading.Thread(target=processor.shutdown, name="tracing-shutdown", daemon=True)
        for processor in processors
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


@contextmanager
def span(
    name: str,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    parent: Context | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Iterator[Span]:
    """Run the body inside a new span; an exception that leaves the body is recorded on it.

    Not around a `yield` of an async generator: its context would be detached in another task;
    use `record_span` there.
    """
    tracer = trace.get_tracer(_TRACER_NAME)
    with tracer.start_as_current_span(
        name, context=parent, kind=kind, attributes=attributes
    ) as current:
        yield current


def record_span(
    name: str,
    *,
    start_ns: int,
    duration_s: float,
    parent: Context,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Context:
    """Write down a span that has already ended and return the context in which it is the parent."""
    tracer = trace.get_tracer(_TRACER_NAME)
    finished = tracer.start_span(name, context=parent, start_time=start_ns, attributes=attributes)
    finished.end(start_ns + max(0, round(duration_s * 1e9)))
    return trace.set_span_in_context(finished, parent)


class SpanRecorder:
    """Writes down finished spans of one piece of work: one parent, some facts in all of them."""

    def __init__(self, facts: Mapping[str, AttributeValue]) -> None:
        self._parent = current_context()
        self._facts = facts

    def record(
        self,
        name: str,
        *,
        start_ns: int,
        duration_s: float,
        more: Mapping[str, AttributeValue] | None = None,
        parent: Context | None = None,
    ) -> Context:
        """Write one down, with `more` facts of its own; return the context in which it is the
        parent.
        """
        return record_span(
            name,
            start_ns=start_ns,
            duration_s=duration_s,
            parent=self._parent if parent is None else parent,
            attributes={**self._facts, **(more or {})},
        )


@contextmanager
def attached(context: Context) -> Iterator[None]:
    """Make `context` the current one for the body; same rule for async generators as `span`."""
    token = otel_context.attach(context)
    try:
        yield
    finally:
        otel_context.detach(token)


def attach_for_task(context: Context) -> None:
    """Make `context` the current one for the rest of this asyncio task."""
    otel_context.attach(context)


def current_context() -> Context:
    """Return the trace context this code runs in."""
    return otel_context.get_current()


def inject(metadata: list[tuple[str, str | bytes]]) -> None:
    """Append `traceparent` (and `tracestate`) of the current context, when there is one."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    metadata.extend(carrier.items())


def extract(metadata: Iterable[tuple[str, str | bytes]]) -> Context:
    """Read the caller's trace context; an absent or malformed one gives an empty context."""
    carrier = {
        key: value
        for key, value in metadata
        if key in {"traceparent", "tracestate"} and isinstance(value, str)
    }
    return _PROPAGATOR.extract(carrier, context=Context())


def trace_id_of(context: Context) -> str:
    """Return the 32 hex digits of the trace `context` belongs to, or "" when it belongs to none."""
    span_context = trace.get_current_span(context).get_span_context()
    return trace.format_trace_id(span_context.trace_id) if span_context.is_valid else ""
