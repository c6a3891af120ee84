"""One trace shows the routing, every attempt, and reaches the workers."""

import asyncio
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from router.request import RoutedRequest
from telemetry import provider, tracing
from telemetry.config import TelemetryConfig
from tests.integration.router.conftest import PROMPT, FakeCluster, collect


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    provider.set_up_tracing("router-test", TelemetryConfig())
    found = trace.get_tracer_provider()
    assert isinstance(found, TracerProvider)
    exporter = InMemorySpanExporter()
    found.add_span_processor(SimpleSpanProcessor(exporter))
    yield exporter
    exporter.shutdown()


async def test_route_and_attempts_are_children_of_the_request(
    cluster: FakeCluster, spans: InMemorySpanExporter
) -> None:
    await cluster.add_prefill()
    await cluster.add_decode(num_refusals=1)
    await cluster.start_router()
    with tracing.span("request", parent=Context()) as root:
        generation = cluster.router.generate(
            RoutedRequest(
                request_id="r",
                token_ids=PROMPT,
                sampling=cluster.sampling(max_tokens=3),
                trace_context=tracing.current_context(),
            )
        )
    await asyncio.create_task(collect(generation))
    trace_id = root.get_span_context().trace_id
    found = [s for s in spans.get_finished_spans() if s.context.trace_id == trace_id]
    names = [span.name for span in found]
    assert names.count("route") == 2
    assert names.count("attempt") == 2
    attributes = by_name(found, "route").attributes or {}
    assert attributes["relevo.prefill.worker"] == "prefill-0"
    assert attributes["relevo.cost.total_s"] > 0  # type: ignore[operator]
    ours = [span for span in found if span.name in {"route", "attempt"}]
    root_id = root.get_span_context().span_id
    assert {span.parent.span_id for span in ours if span.parent} == {root_id}


def by_name(found: list[ReadableSpan], name: str) -> ReadableSpan:
    return next(span for span in found if span.name == name)
