"""The whole configuration: one section per room, one model to check them all.

Precedence: command line `--set` > environment `RELEVO__SECTION__KEY` > file > default.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from api.config import TlsConfig
from cluster.config_sources import (
    ConfigError,
    check_keys,
    merge,
    read_assignments,
    read_environment,
    read_file,
)
from cluster.model_source import DEMO_MODEL_PATH
from kv_transfer.config import KVTransferConfig
from router.config import RouterConfig
from router.scaling.config import DecodeScaling, PoolScaling, PrefillScaling, ScalingConfig
from rpc.config import RpcConfig
from telemetry.config import TelemetryConfig

# Names and values of Ray's node labels; its operators (`!`, `in()`) are not for us.
_Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]{0,253}[A-Za-z0-9])?$")]
NodeLabels = dict[_Label, _Label]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)


class ModelSection(_Section):
    """Which model is served."""

    id: str = ""  # name clients use; empty = the hub id or the last part of the path
    path: str = str(DEMO_MODEL_PATH)  # checkpoint directory or hub id
    dtype: str = "auto"  # float64 (tests), float32, bfloat16, float16; auto = the checkpoint's
    max_model_len: int | None = Field(default=None, ge=1)  # null = what the model allows

    @property
    def name(self) -> str:
        """The model id clients use."""
        return self.id or (self.path if not Path(self.path).exists() else Path(self.path).name)


class EngineSection(_Section):
    """Settings of every engine; a pool may override them."""

    block_size: int = Field(default=32, ge=1)  # tokens per KV block
    num_kv_blocks: int | None = Field(default=None, ge=1)  # null = from the memory there is
    max_num_seqs: int = Field(default=16, ge=1)  # requests in one step
    max_num_batched_tokens: int = Field(default=512, ge=1)  # tokens in one step
    num_threads: int | None = Field(default=None, ge=1)  # null = node cores ÷ engines, at least 1
    pin_threads: bool = True  # on CPUs: each keeps to a core, where a node has one for each
    cuda_graphs: bool = True  # on GPUs: decode steps are captured at the start and replayed
    run_ahead: bool = True  # on GPUs: a step is scheduled and launched while the last one runs


class EngineOverrides(_Section):
    """What one pool sets differently from `engine`; null = as there."""

    block_size: int | None = Field(default=None, ge=1)
    num_kv_blocks: int | None = Field(default=None, ge=1)
    max_num_seqs: int | None = Field(default=None, ge=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    num_threads: int | None = Field(default=None, ge=1)
    pin_threads: bool | None = None
    cuda_graphs: bool | None = None
    run_ahead: bool | None = None


class PoolSection(_Section):
    """One pool of workers."""

    replicas: int = Field(default=1, ge=0)
    num_gpus: float = Field(default=0.0, ge=0)  # per worker; 0 = runs on the CPU
    num_cpus: float = Field(default=0.4, ge=0)  # per worker, as Ray counts; 2 + 2 fit two cores
    drain_s: float = Field(default=30.0, ge=0)  # what running streams get when a worker stops
    node_labels: NodeLabels = {}  # Ray's labels a node must carry to get one
    engine: EngineOverrides = EngineOverrides()
    autoscaling: PoolScaling | None = None  # null = always `replicas` workers

    @property
    def most_replicas(self) -> int:
        """How many there may be at once."""
        return self.replicas if self.autoscaling is None else self.autoscaling.max

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        scaling = self.autoscaling
        if scaling is not None and not scaling.min <= self.replicas <= scaling.max:
            raise ValueError(
                f"replicas is {self.replicas}, the number to start with, but"
                f" autoscaling.min is {scaling.min} and autoscaling.max {scaling.max}"
            )
        return self


class PrefillSection(PoolSection):
    """The prefill pool."""

    autoscaling: PrefillScaling | None = None


class DecodeSection(PoolSection):
    """The decode pool: without one nothing can be served."""

    autoscaling: DecodeScaling | None = None

    @model_validator(mode="after")
    def _check_serves(self) -> Self:
        if self.replicas == 0:
            raise ValueError("replicas is 0, but without a decode worker nothing can be served")
        return self


class ClusterSection(_Section):
    """Where everything runs."""

    ray_address: str = "local"  # local = a Ray of our own; auto or host:port = join that cluster
    bind_host: str = "127.0.0.1"  # all our own sockets
    token_file: str = ""  # secret of our internal gRPC; empty = made for a local cluster


class IngressSection(_Section):
    """The HTTP and gRPC front."""

    http_port: int = Field(default=8000, ge=1, le=65535)
    grpc_port: int = Field(default=9000, ge=1, le=65535)
    replicas: int = Field(default=1, ge=1)
    max_per_node: int = Field(default=1, ge=1)  # more than 1: they share the ports of their node
    node_labels: NodeLabels = {}  # Ray's labels a node must carry to get one
    tls: TlsConfig | None = None  # of both ports; null = plain text
    api_keys_file: str = ""  # a key a line: SECURITY.md; empty = everybody may call
    tenant_cache_salt: bool = False  # no tenant's prompts are found in another's cache
    reflection: bool | None = None  # null = on without keys, off with keys
    channelz: bool = False  # gRPC's own view of its channels and sockets, the inner ones too
    strict: bool = False  # unknown HTTP fields are errors


class ClusterConfig(_Section):
    """Everything a person can set. A test holds the list of fields."""

    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    prefill: PrefillSection = PrefillSection()  # replicas 0 = aggregated
    decode: DecodeSection = DecodeSection()
    router: RouterConfig = RouterConfig()
    kv_transfer: KVTransferConfig = KVTransferConfig()
    rpc: RpcConfig = RpcConfig()
    cluster: ClusterSection = ClusterSection()
    ingress: IngressSection = IngressSection()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="after")
    def _check_across_sections(self) -> Self:
        if self.prefill.replicas == 0 and self.router.local_prefill == "never":
            raise ValueError(
                "router.local_prefill=never needs prefill workers, but prefill.replicas is 0"
            )
        if self.ingress.http_port == self.ingress.grpc_port:
            raise ValueError(
                f"ingress.http_port and ingress.grpc_port are both {self.ingress.http_port}"
            )
        if self.ingress.tenant_cache_salt and not self.ingress.api_keys_file:
            raise ValueError("ingress.tenant_cache_salt needs ingress.api_keys_file")
        return self

    @property
    def scaling(self) -> ScalingConfig:
        """What of it the router decides by."""
        return ScalingConfig(prefill=self.prefill.autoscaling, decode=self.decode.autoscaling)

    @property
    def is_local(self) -> bool:
        """Whether this cluster starts a Ray of its own."""
        return self.cluster.ray_address == "local"


def load_config(
    file: Path | None = None,
    *,
    assignments: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
) -> ClusterConfig:
    """Merge all sources and check them; ConfigError with one line for the first thing wrong."""
    sources = {
        f"the file {file}": read_file(file) if file else {},
        "the environment": read_environment(os.environ if environ is None else environ),
        "--set": read_assignments(assignments),
    }
    tree: dict[str, Any] = {}
    for source, part in sources.items():
        check_keys(part, ClusterConfig, source=source)
        tree = merge(tree, part)
    return _validate(tree)


def config_from_args(args: Mapping[str, Any]) -> ClusterConfig:
    """Check a tree of keys that came whole, such as the `args` of a Serve config file.

    `config_file` among them names a file of the same keys; what stands beside it wins.
    """
    over = dict(args)
    file = over.pop("config_file", None)
    tree = read_file(Path(file)) if file else {}
    check_keys(tree, ClusterConfig, source=f"the file {file}")
    check_keys(over, ClusterConfig, source="args")
    return _validate(merge(tree, over))


def non_defaults(config: ClusterConfig) -> str:
    """What a person has set, as they would write it; a secret is never a value of a key."""
    found, usual = config.model_dump(), ClusterConfig().model_dump()
    return " ".join(f"{key}={value}" for key, value in _differences(found, usual, ""))


def _differences(
    found: Mapping[str, Any], usual: Mapping[str, Any] | None, prefix: str
) -> Iterator[tuple[str, Any]]:
    for name, value in found.items():
        other = (usual or {}).get(name)
        if isinstance(value, Mapping):
            nested = other if isinstance(other, Mapping) else None
            yield from _differences(value, nested, f"{prefix}{name}.")
        elif value != other:
            yield f"{prefix}{name}", value


def _validate(tree: Mapping[str, Any]) -> ClusterConfig:
    try:
        config = ClusterConfig.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        # A room's configuration says "Got self.min = 0": to who set it, that is a key.
        reason = first["msg"].removeprefix("Value error, ").replace("self.", "")
        got = "" if isinstance(first["input"], Mapping) else f" (got {first['input']!r})"
        raise ConfigError(f"config: {f'{place}: ' if place else ''}{reason}{got}") from error
    _check_finite(config.model_dump(), "")
    return config


def _check_finite(section: Mapping[str, Any], prefix: str) -> None:
    """ConfigError for a number that is none: no comparison would refuse it, no wait would end."""
    for name, value in section.items():
        if isinstance(value, Mapping):
            _check_finite(value, f"{prefix}{name}.")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"config: {prefix}{name}: got {value} but expected a finite number")
