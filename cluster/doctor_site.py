"""What the configuration asks of this machine: a model, files, ports, memory."""

from collections.abc import Iterator
from pathlib import Path

import psutil

from cluster import preflight, rooms
from cluster.config import ClusterConfig
from cluster.config_sources import ConfigError
from cluster.finding import Finding, ok, problem, warning
from cluster.model_source import is_hub_id
from cluster.start_error import StartError
from engine.pool_size import machine_memory_bytes
from plan.memory import plan_memory
from plan.model_config import ModelConfig, read_model_config
from plan.parameters import count_parameters
from sim.devices import this_cpu

_GIB = 1024**3
_PROCESS_BYTES = 400 * 1024**2  # a worker's libraries, its share of Ray


def examine(config: ClusterConfig) -> Iterator[Finding]:
    """All of it."""
    yield from check_settings(config)
    yield check_model(config)
    if (model := _served_model(config)) is not None:
        yield check_memory(config, model)
    if not config.is_local:
        return  # their ports are on other machines
    for key, port in preflight.ports(config).items():
        yield check_port(config.cluster.bind_host, port, key=key)
    if config.rpc.port_range:
        yield check_port_range(config)


def check_settings(config: ClusterConfig) -> Iterator[Finding]:
    """Numbers that do not fit together, files that are not there."""
    try:
        rooms.check(config)
        preflight.check_files(config)
    except (ConfigError, StartError) as error:
        yield problem("config", str(error), "`relevo config show` prints every key with its value")


def check_model(config: ClusterConfig) -> Finding:
    """Whether the checkpoint is there, can be read, and is of a kind that is served."""
    path = config.model.path
    try:
        preflight.check_model(path)
        if (model := _model_config(config)) is None:
            return ok("model", f"{path}, from the hub")
        num_parameters = count_parameters(model).total
    except StartError as error:
        return problem("model", str(error), "model.path takes a directory or a hub id")
    except ValueError as error:
        # The engine knows more families than are counted; it has the last word.
        return warning("model", str(error), "`relevo serve` says whether the engine takes it")
    unreadable = [file for file in Path(path).expanduser().glob("*") if not _can_read(file)]
    if unreadable:
        return problem("model", f"cannot read {unreadable[0]}", "chmod it for this user")
    return ok("model", f"{path}: {model.model_type}, {num_parameters / 1e6:,.0f} M parameters")


def check_memory(config: ClusterConfig, model: ModelConfig) -> Finding:
    """Whether the CPU workers' weights and KV fit this machine, all of them on it."""
    try:
        num_bytes = _needed_bytes(config, model)
    except ValueError as error:
        return problem("memory", str(error), "a smaller model, or model.dtype: bfloat16")
    free, total = psutil.virtual_memory().available, machine_memory_bytes()
    free = min(free, total)
    text = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free; workers here may take "
    text += f"{num_bytes / _GIB:.1f} GiB when their KV is full"
    if num_bytes > free:
        advice = "fewer replicas, or a smaller engine.num_kv_blocks; `relevo plan` tells the parts"
        return warning("memory", text, advice)
    return ok("memory", text)


def check_port(host: str, port: int, *, key: str) -> Finding:
    """Whether a server could listen there, and who does if not."""
    name = f"port {port}"
    try:
        preflight.check_port(host, port, key=key)
    except StartError as error:
        return problem(name, f"{error}{_listener(port)}", f"--set {key}=PORT, or end what has it")
    return ok(name, f"free on {host} ({key})")


def check_port_range(config: ClusterConfig) -> Finding:
    """Whether the workers' servers find ports in their range."""
    low, high = (int(part) for part in config.rpc.port_range.split("-"))
    free = [port for port in range(low, high + 1) if _is_free(config.cluster.bind_host, port)]
    needed = config.prefill.replicas + config.decode.replicas
    text = f"{len(free)} of {high - low + 1} free ({config.rpc.port_range})"
    if len(free) < needed:
        return problem(
            "rpc ports", text, f"rpc.port_range needs a port for each of {needed} workers"
        )
    return ok("rpc ports", text)


def _needed_bytes(config: ClusterConfig, model: ModelConfig) -> int:
    """Of all CPU workers, weights once: pages of a file are shared by those who map it."""
    own, shared = 0, 0
    for pool in (config.prefill, config.decode):
        if pool.num_gpus == 0:
            engine = rooms.engine_config(config, pool, num_threads=1)
            memory = plan_memory(model, count_parameters(model), engine, this_cpu())
            own += pool.replicas * (memory.kv_bytes + memory.buffer_bytes + _PROCESS_BYTES)
            shared = max(shared, memory.weights_bytes)
    return own + shared


def _model_config(config: ClusterConfig) -> ModelConfig | None:
    path = Path(config.model.path).expanduser()
    if is_hub_id(config.model.path) or not (path / "config.json").is_file():
        return None
    return read_model_config(path)


def _served_model(config: ClusterConfig) -> ModelConfig | None:
    try:
        return _model_config(config)
    except ValueError:
        return None


def _can_read(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            opened.read(1)
    except IsADirectoryError:
        return True
    except OSError:
        return False
    return True


def _is_free(host: str, port: int) -> bool:
    try:
        preflight.check_port(host, port, key="")
    except StartError:
        return False
    return True


def _listener(port: int) -> str:
    """Whose it is; empty where this user may not know."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return ""
    for each in connections:
        is_there = each.status == psutil.CONN_LISTEN and list(each.laddr)[1:2] == [port]
        if is_there and each.pid:
            try:
                process = psutil.Process(each.pid)
                return f"; {process.name()} (pid {each.pid}) listens there"
            except psutil.NoSuchProcess:
                return ""
    return ""
