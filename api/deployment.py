"""The Ray Serve wrapper of an ingress: router, HTTP and gRPC in one replica.

What knows Ray or a hub is handed in by `cluster/`: discovery over Serve's handles, the second
place for metrics, where the tokenizer lies on this node.
"""

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from ray.serve.handle import DeploymentHandle

from api.config import IngressConfig, ModelConfig
from router.config import RouterConfig
from router.discovery import Discovery
from router.scaling.config import ScalingConfig
from rpc.channel import ChannelPool
from rpc.config import RpcConfig
from rpc.start_imports import import_whole
from rpc.token import read_token
from telemetry.config import TelemetryConfig
from telemetry.logs import set_up_logging
from telemetry.metrics import Metrics, MetricSink
from telemetry.prometheus_sink import PrometheusSink


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressSettings:
    """All that one ingress is built from."""

    ingress: IngressConfig
    model: ModelConfig
    router: RouterConfig
    scaling: ScalingConfig
    rpc: RpcConfig
    telemetry: TelemetryConfig
    token_file: str
    name_ingress: Callable[[str], str]  # the deployment's -> this replica's
    find_siblings: Callable[[], Set[int]]  # processes that may share our ports, this one too
    make_discovery: Callable[[Sequence[DeploymentHandle[Any]]], Discovery]
    wrap_sink: Callable[[MetricSink], MetricSink]
    find_model: Callable[[str], str]  # model.path -> directory on this node


class IngressReplica:
    """Owns the router and the servers from the replica's start to its end."""

    _ingress: Any = None  # until __init__ made it; __del__ runs after a failed one too

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, name: str, settings: IngressSettings, *workers: DeploymentHandle[Any]
    ) -> None:
        set_up_logging()
        self._name = settings.name_ingress(name)
        self._shown: Mapping[str, Any] = {}
        sink = PrometheusSink()
        metrics = Metrics(settings.wrap_sink(sink))
        self._channels = ChannelPool(token=read_token(settings.token_file), config=settings.rpc)
        # Only now: whoever deploys this class would wait for what it needs none of.
        self._router = import_whole("router.router").Router(
            settings.router,
            settings.make_discovery(workers),
            self._channels,
            ingress_id=self._name,
            scaling=settings.scaling,
            metrics=metrics,
            now=time.monotonic,
        )
        await self._router.start()
        model = replace(settings.model, path=settings.find_model(settings.model.path))
        telemetry = settings.telemetry
        if settings.ingress.shares_ports:
            telemetry = telemetry.of_one(self._name)
        self._ingress = import_whole("api.ingress").Ingress(
            settings.ingress,
            model,
            router=self._router,
            sink=sink,
            metrics=metrics,
            telemetry=telemetry,
        )
        await self._ingress.start(settings.find_siblings)

    def reconfigure(self, shown: Mapping[str, Any]) -> None:
        """Show what we are part of: Serve calls it after the start, and when only that changed."""
        self._shown = shown
        self._ingress.serving.config_digest = shown["config_digest"]
        self._router.placement = shown["placement"]

    def status(self) -> dict[str, object]:
        """The body of /v1/status, which configuration that is, and our last line of statistics."""
        number, line = (0, "") if self._ingress is None else self._ingress.stats
        status: dict[str, object] = self._router.status()
        stats = {"of": self._name, "number": number, "line": line}
        return status | {"stats": stats, "config": self._shown.get("config_digest")}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """How many workers each pool should have; Serve asks for it about once a second.

        By the pool's name, and as `<pool>_floor` whether that is only the least (1) or not (0);
        empty while it is not known. Asked where a pool grows and shrinks.
        """
        wishes = self._router.scale()
        stats = {pool: float(wish.target) for pool, wish in wishes.items()}
        return stats | {f"{pool}_floor": float(wish.is_floor) for pool, wish in wishes.items()}

    def __repr__(self) -> str:
        return self._name

    async def __del__(self) -> None:
        if self._ingress is None:
            return
        await self._ingress.stop()
        await self._router.stop()
        await self._channels.close()
