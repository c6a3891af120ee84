"""Spans and W3C trace context of this process.

Without a provider spans are still made, so that `traceparent` travels on.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

# Made once: asking for it took a third of a span's time. It follows the provider that is set later.
_TRACER = trace.get_tracer("relevo")
_PROPAGATOR = TraceContextTextMapPropagator()
_MAX_CHARACTERS = {"traceparent": 256, "tracestate": 512}


@contextmanager
def span(
    name: str,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    parent: Context | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
    records_exceptions: bool = True,
) -> Iterator[Span]:
    """Run the body inside a new span; an exception that leaves the body is recorded on it.

    Not around a `yield` of an async generator: its context would be detached in another task;
    use `record_span` there.
    """
    with _TRACER.start_as_current_span(
        name,
        context=parent,
        kind=kind,
        attributes=attributes,
        record_exception=records_exceptions,
        set_status_on_exception=records_exceptions,
    ) as current:
        yield current


def record_span(  # noqa: PLR0913 - all that a span is
    name: str,
    *,
    start_ns: int,
    duration_s: float,
    parent: Context,
    attributes: Mapping[str, AttributeValue] | None = None,
    links: Iterable[Context] = (),
    events: Iterable["Moment"] = (),
) -> Context:
    """Write down a span that has already ended and return the context in which it is the parent."""
    finished = _TRACER.start_span(
        name,
        context=parent,
        start_time=start_ns,
        attributes=attributes,
        links=_links(links),
    )
    for each in events:
        finished.add_event(each.name, each.attributes, timestamp=each.at_ns)
    finished.end(start_ns + max(0, round(duration_s * 1e9)))
    return trace.set_span_in_context(finished, parent)


def begin_span(name: str, *, parent: Context) -> tuple[Span, Context]:
    """Start a span that somebody must end, and return the context in which it is the parent."""
    begun = _TRACER.start_span(name, context=parent)
    return begun, trace.set_span_in_context(begun, parent)


def add_event(context: Context, name: str, attributes: Mapping[str, AttributeValue]) -> None:
    """Note that something happened now to the span of `context`."""
    trace.get_current_span(context).add_event(name, attributes)


def _links(contexts: Iterable[Context]) -> Sequence[Link]:
    found = (trace.get_current_span(each).get_span_context() for each in contexts)
    return [Link(each) for each in found if each.is_valid]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Something that happened to a span that is written down later."""

    name: str
    at_ns: int
    attributes: Mapping[str, AttributeValue]


class SpanRecorder:
    """Writes down the spans of one piece of work: one parent, some facts in those below it."""

    def __init__(self, facts: Mapping[str, AttributeValue]) -> None:
        self._parent = current_context()
        self._facts = facts

    def record(  # noqa: PLR0913 - all that a span is
        self,
        name: str,
        *,
        start_ns: int,
        duration_s: float,
        more: Mapping[str, AttributeValue] | None = None,
        parent: Context | None = None,
        links: Iterable[Context] = (),
        events: Iterable[Moment] = (),
    ) -> Context:
        """Write one down, with `more` facts of its own; return the context in which it is the
        parent.
        """
        return record_span(
            name,
            start_ns=start_ns,
            duration_s=duration_s,
            parent=self._parent if parent is None else parent,
            # A part of another span of ours need not repeat what that one says.
            attributes={**(self._facts if parent is None else {}), **(more or {})},
            links=links,
            events=events,
        )

    def begin(self, name: str) -> tuple[Span, Context]:
        """Start one that somebody must end, and return the context in which it is the parent."""
        begun, context = begin_span(name, parent=self._parent)
        begun.set_attributes(self._facts)
        return begun, context


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
    """Read the caller's trace context; an absent or malformed one gives an empty context.

    A tracestate longer than W3C asks anybody to carry is left behind: it goes on with every call.
    """
    carrier = {
        key: value
        for key, value in metadata
        if key in _MAX_CHARACTERS and isinstance(value, str) and len(value) <= _MAX_CHARACTERS[key]
    }
    return _PROPAGATOR.extract(carrier, context=Context())


def trace_id_of(context: Context) -> str:
    """Return the 32 hex digits of the trace `context` belongs to, or "" when it belongs to none."""
    span_context = trace.get_current_span(context).get_span_context()
    return trace.format_trace_id(span_context.trace_id) if span_context.is_valid else ""
