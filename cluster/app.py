"""The Serve application: an ingress in front of two pools of workers.

`build_app` is what `import_path: cluster.app:build_app` names; its `args` are the keys of
`deploy/local.yaml`, or `config_file`, the path of a file of them on every node. The environment is
not read here: what Serve is given is the whole truth.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.schema import LoggingConfig

from api.deployment import IngressReplica, IngressSettings
from cluster import rooms
from cluster.actor_name import ActorName
from cluster.autoscaling import ingress_options, pool_options
from cluster.config import ClusterConfig, PoolSection, config_from_args
from cluster.discovery import ServeDiscovery
from cluster.model_source import front_directory
from cluster.placement_plan import Node, PoolPlace, plan_placement
from cluster.ray_metrics import with_ray_sink
from cluster.releases import digest_of
from cluster.replica_name import replica_name
from cluster.replica_version import version_of
from cluster.siblings import find_siblings
from decode_workers.kind import DECODE
from prefill_workers.kind import PREFILL
from rpc.token import create_token
from workers.config import WorkerConfig
from workers.deployment import WorkerReplica
from workers.kind import WorkerKind

DEFAULT_TOKEN_FILE = "~/.relevo/token"
# Serve's calls are `describe` and `status` only: neither may wait for another.
MAX_ONGOING_CALLS = 1000
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 10.0
SHUTDOWN_SPARE_S = 10.0  # beyond the drain


def build_app(args: Mapping[str, Any]) -> Application:
    """Build the application from a tree of configuration keys; ConfigError for a wrong one."""
    return build(args)


def build(args: Mapping[str, Any], *, salt: str = "") -> Application:
    """The same; with another `salt` every replica counts as another one."""
    asked = config_from_args(args)
    config = _with_token(rooms.with_absolute_paths(asked))
    rooms.check(config)
    nodes = ray_nodes()
    num_threads = rooms.threads_per_engine(config, node_cpus=[node.num_cpus for node in nodes])
    plan = plan_placement(nodes, rooms.pool_needs(config), reach=config.kv_transfer.reach)
    sections: list[tuple[WorkerKind, PoolSection]] = [(DECODE, config.decode)]
    if config.prefill.replicas:
        sections.insert(0, (PREFILL, config.prefill))
    pools = [
        _workers(
            kind,
            section,
            plan.pools[kind.pool],
            rooms.worker_config(config, section, num_threads=num_threads),
            salt,
        )
        for kind, section in sections
    ]
    # What only is shown changes without a new replica: a new ingress is one that serves otherwise.
    shown = {"config_digest": digest_of(asked), "placement": list(plan.reasons)}
    return _ingress(config, shown, salt).bind(
        ActorName("ingress"), _ingress_settings(config), *pools
    )


def _ingress_settings(config: ClusterConfig) -> IngressSettings:
    return IngressSettings(
        ingress=rooms.ingress_config(config),
        model=rooms.model_config(config, created=int(time.time())),
        router=config.router,
        scaling=config.scaling,
        rpc=config.rpc,
        telemetry=config.telemetry,
        token_file=config.cluster.token_file,
        name_ingress=replica_name,
        find_siblings=find_siblings,
        make_discovery=ServeDiscovery,
        wrap_sink=with_ray_sink,
        find_model=front_directory,
    )


def _ingress(config: ClusterConfig, shown: Mapping[str, Any], salt: str) -> Deployment:
    made_of = (
        rooms.ingress_config(config),
        rooms.model_config(config, created=0),
        config.router,
        config.scaling,
        config.rpc,
        config.telemetry,
        config.cluster.token_file,
    )
    return _deployment(
        "Ingress",
        IngressReplica,
        version_of(*made_of, salt=salt),
        **ingress_options(config.ingress.replicas, is_scaling=config.scaling.is_on),
        user_config=shown,
        # All listen on the same ports.
        max_replicas_per_node=config.ingress.max_per_node,
        graceful_shutdown_timeout_s=rooms.ingress_config(config).drain_s + SHUTDOWN_SPARE_S,
        ray_actor_options={"num_cpus": rooms.INGRESS_CPUS, **_where(config.ingress.node_labels)},
    )


def _workers(
    kind: WorkerKind, pool: PoolSection, place: PoolPlace, worker_config: WorkerConfig, salt: str
) -> Application:
    deployment = _deployment(
        f"{kind.pool.capitalize()}Worker",
        WorkerReplica,
        version_of(kind.pool, worker_config.to_dict(), salt=salt),
        **pool_options(kind.pool, pool.replicas, pool.autoscaling),
        max_replicas_per_node=place.max_per_node,
        graceful_shutdown_timeout_s=pool.drain_s + SHUTDOWN_SPARE_S,
        ray_actor_options={
            "num_cpus": pool.num_cpus,
            "num_gpus": pool.num_gpus,
            **_where(place.node_labels),
        },
    )
    return deployment.bind(ActorName(kind.pool), kind, worker_config, with_ray_sink, replica_name)


def _where(node_labels: Mapping[str, str]) -> dict[str, Any]:
    return {"label_selector": dict(node_labels)} if node_labels else {}


def _deployment(name: str, replica: type, version: str, **options: Any) -> Deployment:
    decorate = serve.deployment(
        name=name,
        max_ongoing_requests=MAX_ONGOING_CALLS,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        # Streams are none of Serve's business: __del__ drains them, Serve's own wait adds nothing.
        graceful_shutdown_wait_loop_s=0.1,
        logging_config=LoggingConfig(enable_access_log=False),
        **options,
    )
    # Serve has no public option for it any more; its own default is another one each time.
    return decorate(replica).options(version=version, _internal=True)


def _with_token(config: ClusterConfig) -> ClusterConfig:
    """Name the token's file; where none is named, one in the home directory, made if missing."""
    token_file = config.cluster.token_file
    path = Path(token_file or DEFAULT_TOKEN_FILE).expanduser()
    if not token_file:
        create_token(path)
    cluster = config.cluster.model_copy(update={"token_file": str(path)})
    return config.model_copy(update={"cluster": cluster})


def ray_nodes() -> list[Node]:
    """The nodes of the Ray cluster that are alive; none where there is no connection to one."""
    if not ray.is_initialized():
        return []
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return [
        Node(
            node_id=node["NodeID"],
            num_cpus=node["Resources"].get("CPU", 0.0),
            num_gpus=node["Resources"].get("GPU", 0.0),
            labels=node["Labels"],
        )
        for node in nodes
        if node["Alive"]
    ]
