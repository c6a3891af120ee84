"""A whole relay without Ray: worker processes, and the real router in the test's own loop."""

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from relevo.v1 import common_pb2

from api.config import IngressConfig, ModelConfig
from api.ingress import Ingress
from router.config import RouterConfig
from router.discovery import StaticDiscovery
from router.report import RequestReport
from router.request import RoutedRequest
from router.router import Router
from router.scaling.config import ScalingConfig
from rpc.channel import ChannelPool
from rpc.config import RpcConfig
from rpc.description import WorkerDescription
from rpc.token import read_token
from telemetry.config import TelemetryConfig
from telemetry.metrics import Metrics
from telemetry.prometheus_sink import PrometheusSink
from tests.cluster_processes import ClusterProcesses
from tests.patience import comes_true

READY_WITHIN_S = 60.0


@asynccontextmanager
async def relay(
    processes: ClusterProcesses,
    workers: Sequence[WorkerDescription],
    config: RouterConfig,
    *,
    ingress_id: str = "test",
) -> AsyncIterator[Router]:
    """A started router over these workers, ready to serve over every pair."""
    channels = ChannelPool(token=read_token(processes.token_file), config=RpcConfig())
    router = Router(config, StaticDiscovery(workers), channels, ingress_id=ingress_id)
    await router.start()
    try:
        await _until_linked(router, workers)
        yield router
    finally:
        await router.stop()
        await channels.close()


@asynccontextmanager
async def ingress_over(
    processes: ClusterProcesses, workers: Sequence[WorkerDescription], config: RouterConfig
) -> AsyncIterator[Ingress]:
    """HTTP and gRPC on free ports in front of these workers; not yet ready."""
    opening = open_ingress(
        workers, config, model_path=processes.model_path, token_file=processes.token_file
    )
    async with opening as ingress:
        yield ingress


@asynccontextmanager
async def open_ingress(
    workers: Sequence[WorkerDescription],
    config: RouterConfig,
    *,
    model_path: Path,
    token_file: Path,
    ingress_id: str = "ingress",
    telemetry: TelemetryConfig | None = None,
    scaling: ScalingConfig | None = None,
) -> AsyncIterator[Ingress]:
    """The same for workers of whatever kind."""
    sink = PrometheusSink()
    channels = ChannelPool(token=read_token(token_file), config=RpcConfig())
    router = Router(
        config,
        StaticDiscovery(workers),
        channels,
        ingress_id=ingress_id,
        metrics=Metrics(sink),
        scaling=scaling,
    )
    ingress = Ingress(
        IngressConfig(http_port=0, grpc_port=0, drain_s=1.0),
        ModelConfig(model_id="tiny", path=str(model_path)),
        router=router,
        sink=sink,
        telemetry=telemetry,
    )
    await router.start()
    await ingress.start()
    try:
        yield ingress
    finally:
        await ingress.stop()
        await router.stop()
        await channels.close()


async def _until_linked(router: Router, workers: Sequence[WorkerDescription]) -> None:
    feeders = {each.worker_id for each in workers if each.pool == "prefill"}
    num_links = len(feeders) * (len(workers) - len(feeders))
    if not await comes_true(
        lambda: router.is_ready() and _ready_links(router, feeders) == num_links, READY_WITHIN_S
    ):
        raise AssertionError(f"the relay is not ready: {router.status()}")


def _ready_links(router: Router, feeders: Collection[str]) -> int:
    return sum(
        link.state == "ready" and link.peer_id in feeders
        for report in router.loads()
        if report.pool == "decode"
        for link in report.load.links
    )


async def generate(
    router: Router, name: str, prompt: Sequence[int], *, max_tokens: int
) -> tuple[list[int], RequestReport]:
    """Serve one greedy request to its end."""
    generation = router.generate(
        RoutedRequest(
            request_id=name,
            token_ids=prompt,
            sampling=common_pb2.SamplingParams(
                temperature=0.0, top_p=1.0, max_tokens=max_tokens, ignore_eos=True
            ),
            request_label=name,
        )
    )
    token_ids: list[int] = []
    async for batch in generation:
        token_ids += batch.token_ids
    return token_ids, generation.report


async def until_quiet(router: Router, *, timeout_s: float = 5.0) -> None:
    """Wait until no worker runs, waits for or keeps anything, and check every pool's sum."""
    if not await comes_true(
        lambda: all(_is_quiet(report.load) for report in router.loads()), timeout_s
    ):
        raise AssertionError(f"the pools are not quiet: {router.status()}")


def _is_quiet(load: object) -> bool:
    blocks = load.blocks
    counted = blocks.free + blocks.cached + blocks.used + blocks.held + blocks.quarantined
    assert counted == blocks.total, f"blocks do not add up: {blocks}"
    busy = blocks.used + blocks.held + blocks.quarantined
    return not (busy or load.num_running or load.num_waiting or load.num_transferring)
