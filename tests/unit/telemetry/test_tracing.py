"""Spans and trace context."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from telemetry import provider, tracing
from telemetry.config import TelemetryConfig

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SAMPLED = [("traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-01")]
UNSAMPLED = [("traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-00")]


@pytest.fixture(scope="module")
def exporter():
    """The tracer provider is global, so the module shares one exporter."""
    provider.set_up_tracing("test", TelemetryConfig())
    exporter = InMemorySpanExporter()
    trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


@pytest.fixture
def spans(exporter):
    exporter.clear()
    return exporter.get_finished_spans


def test_setting_up_twice_keeps_the_provider():
    provider.set_up_tracing("test", TelemetryConfig())
    first = trace.get_tracer_provider()
    assert isinstance(first, TracerProvider)
    provider.set_up_tracing("other", TelemetryConfig(sample_ratio=0.0))
    assert trace.get_tracer_provider() is first


def test_context_travels_from_inject_to_extract(spans):
    with tracing.span("outer") as outer:
        metadata = []
        tracing.inject(metadata)
    assert [key for key, _ in metadata] == ["traceparent"]
    with tracing.span("inner", parent=tracing.extract(metadata)):
        pass
    finished = {each.name: each for each in spans()}
    assert finished["inner"].context.trace_id == outer.get_span_context().trace_id
    assert finished["inner"].parent.span_id == finished["outer"].context.span_id


def test_extract_gives_an_empty_context_for_nothing_and_for_nonsense():
    for metadata in ([], [("traceparent", "zz")], [("traceparent", b"\xff")], SAMPLED[:0]):
        assert tracing.trace_id_of(tracing.extract(metadata)) == ""
    assert tracing.trace_id_of(tracing.extract(SAMPLED)) == TRACE_ID


@pytest.mark.parametrize(
    ("tracestate", "is_kept"),
    [
        ("vendor=1,other=2", True),
        ("x" * 300 + "=1", False),
        (",".join(f"k{n}={'v' * 200}" for n in range(3)), False),  # would fill our own metadata
        (b"\xff=1", False),
    ],
)
def test_a_long_or_broken_tracestate_goes_no_further(tracestate, is_kept):
    context = tracing.extract([*SAMPLED, ("tracestate", tracestate)])
    assert tracing.trace_id_of(context) == TRACE_ID
    with tracing.attached(context):
        metadata = []
        tracing.inject(metadata)
    assert [key for key, _ in metadata] == ["traceparent"] + ["tracestate"] * is_kept


def test_extract_does_not_inherit_the_context_it_runs_in(spans):
    with tracing.span("unrelated"):
        assert tracing.trace_id_of(tracing.extract([])) == ""


def test_a_callers_verdict_not_to_sample_is_kept(spans):
    with tracing.span("quiet", parent=tracing.extract(UNSAMPLED)):
        metadata = []
        tracing.inject(metadata)
    assert spans() == ()
    assert metadata[0][1].startswith(f"00-{TRACE_ID}-")
    assert metadata[0][1].endswith("-00")


def test_a_recorded_span_has_the_measured_duration_and_can_be_a_parent(spans):
    parent = tracing.extract(SAMPLED)
    context = tracing.record_span(
        "part", start_ns=10**18, duration_s=0.25, parent=parent, attributes={"x": 1}
    )
    tracing.record_span("child", start_ns=10**18, duration_s=-1.0, parent=context)
    part, child = spans()
    assert part.end_time - part.start_time == 250_000_000
    assert part.attributes == {"x": 1}
    assert child.parent.span_id == part.context.span_id
    assert child.end_time == child.start_time


def test_an_exception_is_recorded_on_its_span(spans):
    with pytest.raises(KeyError), tracing.span("broken"):
        raise KeyError("x")
    (broken,) = spans()
    assert not broken.status.is_ok
    assert broken.events[0].name == "exception"


def test_attached_makes_a_context_current_for_its_body_only(spans):
    with tracing.attached(tracing.extract(SAMPLED)):
        assert tracing.trace_id_of(tracing.current_context()) == TRACE_ID
    assert tracing.trace_id_of(tracing.current_context()) == ""


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_a_share_outside_0_and_1_is_refused(ratio):
    with pytest.raises(ValueError, match="sample_ratio"):
        TelemetryConfig(sample_ratio=ratio)
