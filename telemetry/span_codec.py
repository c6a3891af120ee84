"""Finished spans as bytes, in OTLP's own encoding, and back."""

import logging
from collections.abc import Iterable, Sequence

from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue

_LOGGER = logging.getLogger(__name__)


def encode(spans: Sequence[ReadableSpan]) -> bytes:
    """Return them as one ExportTraceServiceRequest."""
    return encode_spans(spans).SerializeToString()


def decode(data: bytes) -> list[ReadableSpan]:
    """Read what `encode` wrote; none when it is no such message."""
    request = trace_service_pb2.ExportTraceServiceRequest()
    try:
        request.ParseFromString(data)
        return [
            _span(span, Resource(_attributes(each.resource.attributes)))
            for each in request.resource_spans
            for scope in each.scope_spans
            for span in scope.spans
        ]
    except (DecodeError, ValueError) as error:
        _LOGGER.warning("Spans of a worker could not be read: %s", error)
        return []


def as_sampled(span: ReadableSpan) -> ReadableSpan:
    """Return the same span as one that is to be exported."""
    context = span.context
    if context.trace_flags.sampled:
        return span
    return ReadableSpan(
        span.name,
        context=_context(context.trace_id, context.span_id),
        parent=span.parent,
        resource=span.resource,
        attributes=span.attributes,
        events=span.events,
        links=span.links,
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )


def _span(span: trace_pb2.Span, resource: Resource) -> ReadableSpan:
    trace_id = int.from_bytes(span.trace_id)
    return ReadableSpan(
        span.name,
        context=_context(trace_id, int.from_bytes(span.span_id)),
        parent=_context(trace_id, int.from_bytes(span.parent_span_id))
        if span.parent_span_id
        else None,
        resource=resource,
        attributes=_attributes(span.attributes),
        events=[
            Event(each.name, _attributes(each.attributes), each.time_unix_nano)
            for each in span.events
        ],
        links=[
            Link(_context(int.from_bytes(each.trace_id), int.from_bytes(each.span_id)))
            for each in span.links
        ],
        kind=SpanKind(max(span.kind - 1, 0)),
        status=Status(
            StatusCode(span.status.code),
            # The SDK warns of words beside any other status.
            span.status.message if span.status.code == StatusCode.ERROR.value else None,
        ),
        start_time=span.start_time_unix_nano,
        end_time=span.end_time_unix_nano,
    )


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(1))


def _attributes(pairs: Iterable[common_pb2.KeyValue]) -> dict[str, AttributeValue]:
    return {pair.key: value for pair in pairs if (value := _value(pair.value)) is not None}


def _value(value: common_pb2.AnyValue) -> AttributeValue | None:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [each.string_value for each in value.array_value.values]
    if kind in {"string_value", "bool_value", "int_value", "double_value"}:
        found: AttributeValue = getattr(value, kind)
        return found
    return None
