"""The span of a request: continues the caller's trace, says much and quotes nothing."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from relevo.v1 import inference_pb2

from api.tokenizer import Tokenizer
from telemetry import provider, tracing
from telemetry.config import TelemetryConfig
from tests.integration.api.conftest import ANSWER, Site, open_site

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


HOSTILE_HEADERS = [
    {"traceparent": "00-" + "0" * 32 + "-00f067aa0ba902b7-01"},
    {"traceparent": f"ff-{TRACE_ID}-00f067aa0ba902b7-01"},
    {"traceparent": TRACEPARENT.upper()},
    {"traceparent": TRACEPARENT + "-" + "x" * 4000},
    {"traceparent": "00-zz-%00-;"},
    {"traceparent": TRACEPARENT, "tracestate": "a=" + "b" * 15_000},
    {"traceparent": TRACEPARENT, "tracestate": ",".join(f"k{n}=v" for n in range(2000))},
    {"traceparent": TRACEPARENT, "tracestate": "=,=,;;"},
    {"baggage": ",".join(f"k{n}={'v' * 100}" for n in range(100))},
]


@pytest.mark.parametrize("headers", HOSTILE_HEADERS, ids=lambda each: str(each)[:40])
async def test_no_header_of_a_trace_can_harm_a_request(site: Site, headers: dict[str, str]) -> None:
    body = {"model": "tiny", "prompt": "hi"}
    named = {"x-request-id": "hostile"}
    done = await site.http.post("/v1/completions", json=body, headers=headers | named)
    assert done.status_code == 200
    assert [each["name"] for each in await spans_of(site, "hostile")] == ["request"]
    context = site.router.generations[-1].request.trace_context
    assert context is not None
    carried: list[tuple[str, str | bytes]] = []
    with tracing.attached(context):
        tracing.inject(carried)
    assert sum(len(key) + len(value) for key, value in carried) < 1024
    generation = inference_pb2.Generation(model="tiny", text="hi")
    metadata = tuple((key, value.strip()) for key, value in headers.items() if len(value) < 8000)
    await site.stub.Generate(
        inference_pb2.GenerateRequest(generation=generation), metadata=metadata
    )


CANARY = "canary-5f2"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": CANARY}]}


async def spans_of(site: Site, label: str) -> Any:
    return (await site.http.get(f"/v1/traces/{label}")).json()["spans"]


async def ask_every_face(site: Site) -> list[dict[str, Any]]:
    """Say the canary once over each face; the attributes of the requests' spans."""
    for path, body in {
        "/v1/chat/completions": CHAT | {"stream": True},
        "/v1/completions": {"model": "tiny", "prompt": CANARY},
        "/v1/messages": CHAT | {"max_tokens": 50},
        "/v1/responses": {"model": "tiny", "input": CANARY},
    }.items():
        done = await site.http.post(
            path, json=body, headers={"x-request-id": path[4:].replace("/", "-")}
        )
        assert done.status_code == 200, done.text
    generation = inference_pb2.Generation(model="tiny", text=CANARY)
    await site.stub.Generate(
        inference_pb2.GenerateRequest(generation=generation),
        metadata=(("x-request-id", "Generate"),),
    )
    chat = inference_pb2.Chat(
        generation=inference_pb2.Generation(model="tiny"),
        messages=[inference_pb2.ChatMessage(role="user", content=CANARY)],
    )
    await site.stub.Chat(inference_pb2.ChatRequest(chat=chat), metadata=(("x-request-id", "Chat"),))
    labels = ("chat-completions", "completions", "messages", "responses", "Generate", "Chat")
    return [
        next(
            each["attributes"] for each in await spans_of(site, label) if each["name"] == "request"
        )
        for label in labels
    ]


async def picture(site: Site) -> str:
    """The first picture of the dashboard's stream."""
    async with site.http.stream(
        "GET", "/dashboard", headers={"accept": "text/event-stream"}
    ) as response:
        return await anext(response.aiter_text())


@pytest.mark.parametrize("captures", [False, True])
async def test_what_is_said_stands_in_spans_when_asked_for_and_nowhere_else(
    model_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, captures: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    telemetry = TelemetryConfig(capture_content=captures)
    async with open_site(model_path, tokenizer, telemetry=telemetry) as site:
        spans = await ask_every_face(site)
        page = (await site.http.get("/metrics")).text + await picture(site)
    for text in (CANARY, ANSWER):
        assert text not in caplog.text + page
        assert (text in json.dumps(spans, ensure_ascii=False)) is captures
    if not captures:
        return
    for found in spans:
        (asked,) = json.loads(found["gen_ai.input.messages"])
        assert asked == {"role": "user", "parts": [{"type": "text", "content": CANARY}]}
        (answered,) = json.loads(found["gen_ai.output.messages"])
        assert answered["parts"] == [{"type": "text", "content": ANSWER}]
        assert answered["finish_reason"] == "stop"
        assert found["relevo.content.is_cut"] is False
