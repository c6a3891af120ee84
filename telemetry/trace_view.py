"""A request's spans as plain data: for JSON, a terminal and a page alike."""

from collections.abc import Collection, Mapping

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import format_span_id, format_trace_id

from telemetry import attributes
from telemetry.trace_store import RequestTrace

_CONTENT = (attributes.GEN_AI_INPUT_MESSAGES, attributes.GEN_AI_OUTPUT_MESSAGES)


def describe_trace(trace: RequestTrace, *, has_content: bool = True) -> dict[str, object]:
    """Return one ended request: its names, its own facts and its spans in the order they began.

    Times are seconds since the request's start, but `started_at`, which is since the epoch.
    Without `has_content` what was asked and answered is left out, should it be there at all.
    """
    root = trace.root
    assert root is not None, "only requests that ended are shown"
    start_ns = root.start_time or 0
    spans = sorted(trace.spans.values(), key=lambda span: (span.start_time or 0, -_duration(span)))
    facts = root.attributes or {}
    return {
        "request_id": facts.get(attributes.RELEVO_REQUEST_ID, ""),
        "label": facts.get(attributes.RELEVO_REQUEST_LABEL, ""),
        "trace_id": format_trace_id(root.context.trace_id),
        "started_at": start_ns / 1e9,
        "duration_s": _duration(root),
        "num_dropped_spans": trace.num_dropped,
        "spans": [
            _describe_span(span, start_ns, hidden=() if has_content else _CONTENT) for span in spans
        ],
    }


def _describe_span(
    span: ReadableSpan, start_ns: int, *, hidden: Collection[str]
) -> dict[str, object]:
    return {
        "name": span.name,
        "span_id": format_span_id(span.context.span_id),
        "parent_id": format_span_id(span.parent.span_id) if span.parent is not None else None,
        "process": span.resource.attributes.get("service.instance.id", ""),
        "start_s": ((span.start_time or 0) - start_ns) / 1e9,
        "duration_s": _duration(span),
        "error": span.status.description or "error" if not span.status.is_ok else None,
        "attributes": {
            key: value for key, value in _plain(span.attributes).items() if key not in hidden
        },
        "events": [
            {
                "name": event.name,
                "at_s": (event.timestamp - start_ns) / 1e9,
                "attributes": _plain(event.attributes),
            }
            for event in span.events
        ],
        "links": [format_span_id(link.context.span_id) for link in span.links],
    }


def _duration(span: ReadableSpan) -> float:
    return ((span.end_time or 0) - (span.start_time or 0)) / 1e9


def _plain(found: Mapping[str, object] | None) -> dict[str, object]:
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in (found or {}).items()
    }
