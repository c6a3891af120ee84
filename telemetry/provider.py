"""The tracer provider of this process: what is recorded, and who hears of it.

    span of this process ─┐
    spans of a worker ────┴─► listeners: an ingress's trace store, a worker's outbox

One provider per process: whoever set one first (Ray Serve may) keeps it, with its own sampling,
and we listen to it. Nothing is exported from here: an ingress knows at a request's end what is
worth it.
"""

import threading
from collections.abc import Sequence
from typing import Protocol

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes

from telemetry import span_codec
from telemetry.config import TelemetryConfig

_lock = threading.Lock()
_listeners: tuple["SpanListener", ...] = ()  # replaced whole, so that nobody iterates over a change
_heard: set[int] = set()  # providers our processor was added to, by id; they live as long as we do


class SpanListener(Protocol):
    """Hears of the spans of this process, and in an ingress of its workers'; must not raise."""

    def started(self, span: ReadableSpan) -> None:
        """A span of this process began."""

    def ended(self, span: ReadableSpan) -> None:
        """A span of this process is complete."""

    def received(self, span: ReadableSpan) -> None:
        """A complete span of a worker arrived."""


class RecordingSampler(Sampler):
    """Decides once per trace whether it is exported; what is not is still recorded if wanted."""

    def __init__(self, ratio: float, *, records_all: bool) -> None:
        self._share = TraceIdRatioBased(ratio)
        self._otherwise = Decision.RECORD_ONLY if records_all else Decision.DROP

    def should_sample(  # noqa: PLR0913, PLR0917 - the SDK's signature
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """Keep the parent's verdict; without a parent draw by the trace id."""
        parent = trace.get_current_span(parent_context).get_span_context()
        if parent.is_valid:
            is_sampled, trace_state = parent.trace_flags.sampled, parent.trace_state
        else:
            result = self._share.should_sample(
                None, trace_id, name, kind, attributes, links, trace_state
            )
            is_sampled = result.decision is Decision.RECORD_AND_SAMPLE
        decision = Decision.RECORD_AND_SAMPLE if is_sampled else self._otherwise
        return SamplingResult(decision, attributes, trace_state)

    def get_description(self) -> str:
        """Name it as the SDK wants it."""
        return "relevo"


class _Announcer(SpanProcessor):
    def on_start(self, span: Span, parent_context: Context | None = None) -> None:  # noqa: ARG002
        for listener in _listeners:
            listener.started(span)

    def on_end(self, span: ReadableSpan) -> None:
        for listener in _listeners:
            listener.ended(span)


def set_up_tracing(service: str, config: TelemetryConfig, *, instance: str = "") -> None:
    """Make this process record its spans; repeating it changes nothing."""
    with _lock:
        provider = trace.get_tracer_provider()
        if not isinstance(provider, TracerProvider):
            names = {"service.name": service, "service.instance.id": instance or service}
            provider = TracerProvider(
                sampler=RecordingSampler(config.sample_ratio, records_all=config.keep_traces > 0),
                resource=Resource.create(names),
                # Nothing of the provider's own is left to send at exit.
                shutdown_on_exit=False,
            )
            trace.set_tracer_provider(provider)
        if id(provider) not in _heard:
            _heard.add(id(provider))
            provider.add_span_processor(_Announcer())


def add_listener(listener: SpanListener) -> None:
    """Tell it of every span from now on."""
    global _listeners  # noqa: PLW0603 - the provider is global, too
    with _lock:
        _listeners = (*_listeners, listener)


def remove_listener(listener: SpanListener) -> None:
    """Tell it no more."""
    global _listeners  # noqa: PLW0603 - the provider is global, too
    with _lock:
        _listeners = tuple(each for each in _listeners if each is not listener)


def receive(data: bytes) -> None:
    """Take spans that a worker sent; nonsense is dropped, for no request depends on it."""
    if _listeners:
        for span in span_codec.decode(data):
            for listener in _listeners:
                listener.received(span)
