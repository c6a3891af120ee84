"""One trace over ingress, prefill and decode: what the workers export to a collector."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from router.config import RouterConfig
from telemetry import attributes
from tests.cluster_processes import ClusterProcesses
from tests.integration.api.test_whole_path import BODY, until_ready
from tests.relay import ingress_over
from tests.tiny_model import make_tiny_model

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
WORKER_SPANS = {
    "relevo-prefill": {
        attributes.SPAN_PREFILL_WAIT,
        attributes.SPAN_PREFILL,
        attributes.SPAN_KV_SEND,
    },
    "relevo-decode": {
        attributes.SPAN_KV_RECEIVE,
        attributes.SPAN_TRANSFER_TAIL,
        attributes.SPAN_SLOT_WAIT,
        attributes.SPAN_DECODE,
    },
}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector that remembers span names by service, of one trace."""

    def __init__(self) -> None:
        self.names: defaultdict[str, set[str]] = defaultdict(set)
        self.text = ""
        self.endpoint = ""

    async def Export(  # noqa: N802 - gRPC's name
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: grpc.aio.ServicerContext,
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.text += str(request)
        for resource in request.resource_spans:
            service = next(
                each.value.string_value
                for each in resource.resource.attributes
                if each.key == "service.name"
            )
            for scope in resource.scope_spans:
                self.names[service] |= {
                    span.name for span in scope.spans if span.trace_id.hex() == TRACE_ID
                }
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    found = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(found, server)
    found.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield found
    await server.stop(None)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_the_caller_s_trace_holds_the_spans_of_both_workers(
    collector: Collector, tmp_path: Path
) -> None:
    processes = ClusterProcesses(tmp_path, make_tiny_model(tmp_path / "model"))
    config = {"telemetry": {"otlp_endpoint": collector.endpoint}}
    try:
        for pool in ("prefill", "decode"):
            processes.start(pool, config=config)
        workers = await asyncio.to_thread(processes.ensure)
        relay = ingress_over(processes, workers, RouterConfig(local_prefill="never"))
        async with relay as ingress:
            url = f"http://127.0.0.1:{ingress.http_port}"
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                await until_ready(http)
                headers = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
                done = await http.post("/v1/completions", json=BODY, headers=headers)
                assert done.status_code == 200, done.text
            deadline_s = time.monotonic() + 30  # spans leave in batches, every few seconds
            while not all(names <= collector.names[each] for each, names in WORKER_SPANS.items()):
                assert time.monotonic() < deadline_s, collector.names
                await asyncio.sleep(0.1)
        assert "quick brown fox" not in collector.text
    finally:
        await asyncio.to_thread(processes.stop_all)
