"""The span of a request: continues the caller's trace, says much and quotes nothing."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from relevo.v1 import inference_pb2

from telemetry import provider, tracing
from telemetry.config import TelemetryConfig
from tests.integration.api.conftest import Site

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    provider.set_up_tracing("test", TelemetryConfig())
    tracer_provider = trace.get_tracer_provider()
    assert isinstance(tracer_provider, TracerProvider)
    found = InMemorySpanExporter()
    tracer_provider.add_span_processor(SimpleSpanProcessor(found))
    return found


async def test_an_http_request_continues_the_caller_s_trace(
    site: Site, exporter: InMemorySpanExporter
) -> None:
    await site.http.post(
        "/v1/chat/completions",
        json={"model": "tiny", "messages": [{"role": "user", "content": "canary"}]},
        headers={"traceparent": TRACEPARENT, "x-request-id": "label"},
    )
    (span,) = (each for each in exporter.get_finished_spans() if each.name.endswith("request"))
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    found = dict(span.attributes or {})
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.model"] == "tiny"
    assert found["gen_ai.response.finish_reasons"] == ("stop",)
    assert found["gen_ai.usage.cache_read.input_tokens"] == 2
    assert found["relevo.request.label"] == "label"
    assert "canary" not in repr(found)
    routed = site.router.generations[0].request
    assert routed.trace_context is not None
    assert tracing.trace_id_of(routed.trace_context) == TRACE_ID


async def test_a_grpc_call_does_too(site: Site, exporter: InMemorySpanExporter) -> None:
    request = inference_pb2.GenerateRequest(
        generation=inference_pb2.Generation(model="tiny", text="canary")
    )
    await site.stub.Generate(request, metadata=(("traceparent", TRACEPARENT),))
    (span,) = (each for each in exporter.get_finished_spans() if each.name.endswith("request"))
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert "canary" not in repr(span.attributes)
