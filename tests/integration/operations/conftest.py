"""One cluster of worker processes for all that looks at it, and an ingress for each test."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from api.ingress import Ingress
from router.config import RouterConfig
from router.scaling.config import DecodeScaling, PrefillScaling, ScalingConfig
from telemetry.config import TelemetryConfig
from tests.cluster_processes import PATIENT, SLOW_STEPS, ClusterProcesses
from tests.integration.api.test_whole_path import until_ready
from tests.relay import open_ingress
from tests.tiny_model import make_tiny_model

REQUEST_LOG = "requests.jsonl"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector that remembers the spans it got."""

    def __init__(self) -> None:
        self.spans: list[trace_pb2.Span] = []
        self.text = ""
        self.endpoint = ""

    async def Export(  # noqa: N802 - gRPC's name
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: grpc.aio.ServicerContext,
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.text += str(request)
        self.spans += [
            span
            for each in request.resource_spans
            for scope in each.scope_spans
            for span in scope.spans
        ]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture(scope="package")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    folder = tmp_path_factory.mktemp("trace")
    model = make_tiny_model(folder / "model")
    cluster = ClusterProcesses(folder, model, kv_transfer=PATIENT, environment=SLOW_STEPS)
    try:
        yield cluster
    finally:
        cluster.stop_all()


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    found = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(found, server)
    found.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield found
    await server.stop(None)


@pytest.fixture
async def ingress(
    processes: ClusterProcesses, collector: Collector, tmp_path: Path
) -> AsyncIterator[Ingress]:
    workers = await asyncio.to_thread(processes.ensure, decode=2)
    opening = open_ingress(
        workers,
        RouterConfig(local_prefill="never"),
        model_path=processes.model_path,
        token_file=processes.token_file,
        scaling=ScalingConfig(prefill=PrefillScaling(), decode=DecodeScaling(max=2)),
        telemetry=TelemetryConfig(
            otlp_endpoint=collector.endpoint, request_log_file=str(tmp_path / REQUEST_LOG)
        ),
    )
    async with opening as opened:
        yield opened


@pytest.fixture
async def http(ingress: Ingress) -> AsyncIterator[httpx.AsyncClient]:
    url = f"http://127.0.0.1:{ingress.http_port}"
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await until_ready(client)
        yield client
