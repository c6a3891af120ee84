"""Builds each room's own configuration from the whole one."""

from dataclasses import replace
from pathlib import Path

from api.config import IngressConfig, ModelConfig
from cluster.config import ClusterConfig, PoolSection
from cluster.config_sources import ConfigError
from cluster.model_source import revision_of
from cluster.placement import Demand
from cluster.placement_plan import PoolNeed
from engine.config import EngineConfig
from workers.config import WorkerConfig

INGRESS_CPUS = 0.2  # 0.2 + 4 x 0.4: an ingress and 2 + 2 workers fit two cores


def engine_config(config: ClusterConfig, pool: PoolSection, *, num_threads: int) -> EngineConfig:
    """The engine of one pool; ValueError when its numbers do not fit together."""
    settings = config.engine.model_dump() | pool.engine.model_dump(exclude_none=True)
    return EngineConfig(
        model_path=config.model.path,
        model_id=config.model.name,
        model_revision=revision_of(config.model.path),
        dtype=config.model.dtype,
        max_model_len=config.model.max_model_len,
        device="cuda" if pool.num_gpus > 0 else "cpu",
        **(settings | {"num_threads": settings["num_threads"] or num_threads}),
    )


def worker_config(config: ClusterConfig, pool: PoolSection, *, num_threads: int) -> WorkerConfig:
    """One worker of this pool."""
    return WorkerConfig(
        engine=engine_config(config, pool, num_threads=num_threads),
        kv_transfer=config.kv_transfer,
        rpc=config.rpc,
        telemetry=config.telemetry,
        bind_host=config.cluster.bind_host,
        token_file=config.cluster.token_file,
        drain_s=pool.drain_s,
    )


def ingress_config(config: ClusterConfig) -> IngressConfig:
    """One ingress."""
    drain_s = max(config.prefill.drain_s, config.decode.drain_s)
    return IngressConfig(
        bind_host=config.cluster.bind_host,
        http_port=config.ingress.http_port,
        grpc_port=config.ingress.grpc_port,
        tls=config.ingress.tls,
        api_keys_file=config.ingress.api_keys_file,
        tenant_cache_salt=config.ingress.tenant_cache_salt,
        reflection=config.ingress.reflection,
        channelz=config.ingress.channelz,
        strict=config.ingress.strict,
        request_timeout_s=config.router.request_timeout_s,
        drain_s=drain_s,
        shares_ports=config.ingress.max_per_node > 1,
        hand_over_s=drain_s / 2 if config.ingress.replicas > 1 else 0.0,
    )


def model_config(config: ClusterConfig, *, created: int) -> ModelConfig:
    """The model as clients see it."""
    return ModelConfig(
        model_id=config.model.name,
        path=config.model.path,
        revision=revision_of(config.model.path),
        created=created,
    )


def check(config: ClusterConfig) -> None:
    """ConfigError when numbers that are right alone do not fit together."""
    try:
        for pool in (config.prefill, config.decode):
            engine_config(config, pool, num_threads=1)
    except ValueError as error:
        raise ConfigError(f"config: {error}") from error


def threads_per_engine(config: ClusterConfig, *, node_cpus: list[float]) -> int:
    """Cores of the smallest node, shared by the engines that one node gets; at least 1."""
    engines = config.prefill.most_replicas + config.decode.most_replicas
    engines_per_node = -(-engines // max(1, len(node_cpus)))
    return max(1, int(min(node_cpus, default=1.0)) // engines_per_node)


def demands(config: ClusterConfig) -> list[Demand]:
    """What every replica needs of its node."""
    pools = (("prefill", config.prefill), ("decode", config.decode))
    workers = [
        Demand(
            name=f"{name}-{rank}",
            num_cpus=pool.num_cpus,
            num_gpus=pool.num_gpus,
            node_labels=pool.node_labels,
        )
        for name, pool in pools
        for rank in range(pool.replicas)
    ]
    ingresses = [
        Demand(
            name=f"ingress-{rank}",
            num_cpus=INGRESS_CPUS,
            max_per_node=config.ingress.max_per_node,
            node_labels=config.ingress.node_labels,
        )
        for rank in range(config.ingress.replicas)
    ]
    return ingresses + workers


def pool_needs(config: ClusterConfig) -> list[PoolNeed]:
    """Both pools, as large as they may become."""
    pools = (("prefill", config.prefill), ("decode", config.decode))
    return [
        PoolNeed(
            name=name,
            num_workers=pool.most_replicas,
            num_cpus=pool.num_cpus,
            num_gpus=pool.num_gpus,
            node_labels=pool.node_labels,
        )
        for name, pool in pools
    ]


def with_absolute_paths(config: ClusterConfig) -> ClusterConfig:
    """The same configuration for processes that run in other directories."""
    if log_file := config.telemetry.request_log_file:
        absolute = str(Path(log_file).expanduser().resolve())
        telemetry = replace(config.telemetry, request_log_file=absolute)
        config = config.model_copy(update={"telemetry": telemetry})
    path = Path(config.model.path).expanduser()
    if not path.exists():
        return config
    model = config.model.model_copy(update={"path": str(path.resolve()), "id": config.model.name})
    return config.model_copy(update={"model": model})
