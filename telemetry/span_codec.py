"""Finished spans as bytes, on their way from a worker to the ingresses, and back.

JSON lists and not OTLP's messages: every span of a worker passes here, and building those cost more
than all else that is done with it.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

_LOGGER = logging.getLogger(__name__)


def encode(spans: Sequence[ReadableSpan]) -> bytes:
    """Return some spans of this process, which has one provider, hence one resource."""
    batch = {"resource": spans[0].resource.attributes, "spans": [_fields(span) for span in spans]}
    return orjson.dumps(batch, default=dict)  # attributes are mappings, but no dicts


def decode(data: bytes) -> list[ReadableSpan]:
    """Read what `encode` wrote; none when it is anything else."""
    try:
        batch = orjson.loads(data)
        resource = Resource(batch["resource"])
        return [_span(*fields, resource=resource) for fields in batch["spans"]]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
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


def _fields(span: ReadableSpan) -> tuple[object, ...]:
    """What `_span` takes, in its order."""
    return (
        span.name,
        f"{span.context.trace_id:x}",  # longer than a number may be
        span.context.span_id,
        0 if span.parent is None else span.parent.span_id,
        span.start_time,
        span.end_time,
        span.attributes,
        [(each.name, each.timestamp, each.attributes) for each in span.events],
        [(f"{each.context.trace_id:x}", each.context.span_id) for each in span.links],
        span.kind.value,
        span.status.status_code.value,
        span.status.description,
    )


def _span(  # noqa: PLR0913, PLR0917 - all that a span is
    name: str,
    trace_id: str,
    span_id: int,
    parent_id: int,
    start_time: int,
    end_time: int,
    attributes: Mapping[str, Any],
    events: Sequence[tuple[str, int, Mapping[str, Any]]],
    links: Sequence[tuple[str, int]],
    kind: int,
    status_code: int,
    description: str | None,
    *,
    resource: Resource,
) -> ReadableSpan:
    number = int(trace_id, 16)
    return ReadableSpan(
        name,
        context=_context(number, span_id),
        parent=_context(number, parent_id) if parent_id else None,
        resource=resource,
        # What is no number has become nothing.
        attributes={key: value for key, value in attributes.items() if value is not None},
        events=[Event(name, facts, timestamp) for name, timestamp, facts in events],
        links=[Link(_context(int(linked, 16), other_id)) for linked, other_id in links],
        kind=SpanKind(kind),
        status=Status(StatusCode(status_code), description),
        start_time=start_time,
        end_time=end_time,
    )


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(1))
