"""Which spans belong to which request, what is forgotten, and what is worth exporting."""

import math
import random

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import SpanKind

from telemetry import attributes, span_codec
from telemetry.provider import RecordingSampler
from telemetry.span_outbox import MAX_WAITING_SPANS, SpanOutbox
from telemetry.trace_store import MAX_SPANS_PER_REQUEST, MIN_REQUESTS, TraceStore
from telemetry.trace_view import describe_trace


class Site:
    """A store behind a tracer of its own; what it exports is kept."""

    def __init__(self, *, ratio: float = 1.0, max_requests: int = 100) -> None:
        self.exported: list[str] = []
        self.store = TraceStore(
            max_requests=max_requests,
            slow_first_token_s=2.0,
            export=lambda span: self.exported.append(span.name),
        )
        self.outbox = SpanOutbox()
        sampler = RecordingSampler(ratio, records_all=True)
        self._provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        self._provider.add_span_processor(_Heard(self))
        self.tracer = self._provider.get_tracer("test")

    def request(self, label: str = "r", *, tenant: str = "") -> trace.Span:
        return self.tracer.start_span(
            "request",
            context=Context(),
            kind=SpanKind.SERVER,
            attributes={
                attributes.RELEVO_REQUEST_LABEL: label,
                attributes.RELEVO_TENANT: tenant,
            },
        )

    def part(self, name: str, parent: trace.Span) -> trace.Span:
        return self.tracer.start_span(name, context=trace.set_span_in_context(parent))


class _Heard(SpanProcessor):
    def __init__(self, site: Site) -> None:
        self._site = site

    def on_start(self, span, parent_context=None):
        self._site.store.started(span)

    def on_end(self, span):
        self._site.store.ended(span)


def names(site: Site, label: str = "r") -> list[str]:
    found = site.store.find(label)
    return [] if found is None else sorted(span.name for span in found.spans.values())


def test_parts_of_parts_belong_to_their_request_whatever_ends_first() -> None:
    site = Site()
    request, other = site.request(), site.request("other")
    attempt = site.part("attempt", request)
    site.part("leaf", attempt).end()
    site.part("stranger", other).end()
    attempt.end()
    assert names(site) == []  # it has not ended
    request.end()
    late = site.part("late", attempt)
    late.end()
    assert names(site) == ["attempt", "late", "leaf", "request"]
    assert site.store.find("None") is None  # names it was never given


def test_a_name_finds_the_newest_request_of_whoever_asks() -> None:
    site = Site(max_requests=MIN_REQUESTS)
    for tenant in ("alice", "bob", "alice"):
        site.request("same", tenant=tenant).end()
    newest = site.store.find("same")
    assert newest is site.store.find("same", tenant="alice")
    assert newest is next(site.store.recent())
    found = site.store.find("same", tenant="bob")
    assert found is not None
    assert found.tenant == "bob"
    assert site.store.find(f"{found.root.context.trace_id:032x}", tenant="bob") is found  # type: ignore[union-attr]
    assert site.store.find(f"{found.root.context.trace_id:032x}", tenant="alice") is None  # type: ignore[union-attr]
    for number in range(MIN_REQUESTS):
        site.request(f"other {number}", tenant="alice").end()
    assert site.store.find("same") is None
    assert len(site.store._named) == 2 * MIN_REQUESTS


def test_a_span_heard_twice_counts_once() -> None:
    site = Site()
    request = site.request()
    part = site.part("part", request)
    part.end()
    request.end()
    site.store.ended(part)
    assert site.exported == ["part", "request"]


def test_a_worker_s_spans_are_found_by_their_remote_parents() -> None:
    site = Site()
    request = site.request()
    attempt = site.part("attempt", request)
    worker = TracerProvider(shutdown_on_exit=False).get_tracer("worker")
    outbox = SpanOutbox()
    whole = worker.start_span(
        "kv.send",
        context=trace.set_span_in_context(attempt),
        links=[trace.Link(request.get_span_context())],
        attributes={"x": 1, "names": ["a", "b"], "share": 0.5, "is_it": True, "nan": math.nan},
    )
    whole.add_event("moved", {"bytes": 3})
    whole.set_status(trace.StatusCode.ERROR, "cut off")
    part = worker.start_span("kv.range", context=trace.set_span_in_context(whole))
    stranger = worker.start_span("stranger", context=Context())
    for span in (whole, part, stranger):
        span.end()
        assert isinstance(span, ReadableSpan)
        outbox.ended(span)
    data, end = outbox.batch(0)
    assert end == 3
    for span in span_codec.decode(data):
        site.store.ended(span)
    attempt.end()
    request.end()
    assert names(site) == ["attempt", "kv.range", "kv.send", "request"]
    found = site.store.find("r")
    assert found is not None
    described = {each["name"]: each for each in describe_trace(found)["spans"]}  # type: ignore[attr-defined]
    sent = described["kv.send"]
    assert sent["attributes"] == {"x": 1, "names": ["a", "b"], "share": 0.5, "is_it": True}
    assert sent["links"] == [described["request"]["span_id"]]
    assert sent["events"][0]["attributes"] == {"bytes": 3}
    assert sent["error"] == "cut off"
    assert sent["duration_s"] > 0.0
    assert described["kv.range"]["parent_id"] == sent["span_id"]


@pytest.mark.parametrize("how", ["sampled", "failed", "slow", "neither"])
def test_what_is_worth_exporting_goes_out_with_all_its_parts(how: str) -> None:
    site = Site(ratio=1.0 if how == "sampled" else 0.0)
    request = site.request()
    site.part("early", request).end()
    if how == "failed":
        request.set_status(trace.StatusCode.ERROR, "internal_error")
    if how == "slow":
        request.set_attribute(attributes.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, 2.5)
    assert site.exported == []
    request.end()
    site.part("late", request).end()
    assert site.exported == ([] if how == "neither" else ["early", "request", "late"])
    assert names(site) == ["early", "late", "request"]  # remembered in any case


def test_exported_spans_are_sampled_ones() -> None:
    site = Site(ratio=0.0)
    request = site.request()
    request.end()
    assert isinstance(request, ReadableSpan)
    assert not request.context.trace_flags.sampled
    sampled = span_codec.as_sampled(request)
    assert sampled.context.trace_flags.sampled
    assert (sampled.name, sampled.start_time) == (request.name, request.start_time)


def test_it_never_holds_more_than_its_limits() -> None:
    site = Site(max_requests=0)
    for number in range(3 * MIN_REQUESTS):
        request = site.request(f"r{number}")
        site.part("part", request).end()
        request.end()
    assert len(list(site.store.recent())) == MIN_REQUESTS
    assert site.store.find("r0") is None
    assert names(site, f"r{3 * MIN_REQUESTS - 1}") == ["part", "request"]
    long = site.request("long")
    for _ in range(2 * MAX_SPANS_PER_REQUEST):
        site.part("part", long).end()
    long.end()
    found = site.store.find("long")
    assert found is not None
    assert (len(found.spans), found.num_dropped > 0) == (MAX_SPANS_PER_REQUEST, True)
    assert len(site.store._owners) == (MIN_REQUESTS - 1) * 2 + MAX_SPANS_PER_REQUEST


def test_requests_may_draw_the_same_ids() -> None:
    site = Site(max_requests=1)
    for _ in range(3 * MIN_REQUESTS):
        random.seed(7)  # which the SDK draws its ids from
        request = site.request()
        site.part("part", request).end()
        request.end()
    assert names(site) == ["part", "request"]
    for _ in range(2 * MIN_REQUESTS):
        site.request("other").end()
    assert names(site) == []


def test_a_slow_reader_of_the_outbox_misses_the_oldest_only() -> None:
    site, outbox = Site(), SpanOutbox()
    for number in range(MAX_WAITING_SPANS + 10):
        span = site.tracer.start_span(str(number))
        span.end()
        assert isinstance(span, ReadableSpan)
        outbox.ended(span)
    seen, start = [], 0
    while True:
        data, start = outbox.batch(start)
        if not data:
            break
        seen += [int(span.name) for span in span_codec.decode(data)]
    assert seen == list(range(10, MAX_WAITING_SPANS + 10))


@pytest.mark.parametrize(
    "data",
    [
        *(b"\xff\x00nonsense", b"", b"[]", b"7", b'{"spans": []}', b'{"resource": 1, "spans": 2}'),
        b'{"resource": {}, "spans": [["too", "few"]]}',
        b'{"resource": {}, "spans": [["name", "xyz", 1, 0, 0, 0, {}, [], [], 0, 0, null]]}',
        b'{"resource": {}, "spans": [["name", "a", 1, 0, 0, 0, [], [], [], 0, 0, null]]}',
        b'{"resource": {}, "spans": [["name", "a", 1, 0, 0, 0, {}, [], [], 99, 0, null]]}',
    ],
)
def test_nonsense_of_a_worker_is_dropped(data: bytes) -> None:
    assert span_codec.decode(data) == []
