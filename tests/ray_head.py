"""The head of a Ray cluster that somebody else started, and nodes that join it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.server_process import free_ports
from rpc.token import create_token
from tests.served_cluster import is_taken

BIN = Path(sys.executable).parent
UP_WITHIN_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A head node of our own, which counts as a foreign one here."""

    process: psutil.Process
    address: str
    dashboard: str
    environment: Mapping[str, str]
    token_file: Path
    log: Path


def replicas(node: psutil.Process) -> list[str]:
    """Names of the Serve replicas that run on a node."""
    names = [child.cmdline()[:1] for child in node.children(recursive=True)]
    return [name[0] for name in names if name and "ServeReplica" in name[0]]


def ingresses(node: psutil.Process) -> list[psutil.Process]:
    """Processes of the ingresses that run on a node."""
    found = []
    for child in node.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "Ingress" in "".join(child.cmdline()[:1]):
                found.append(child)
    return found


@contextmanager
def ray_head(folder: Path) -> Iterator[Head]:
    """A head node of two CPUs, once it is up."""
    create_token(folder / "token")
    port, dashboard, client, agent = free_ports(4)
    # Ray's sockets need a path shorter than pytest's.
    short = Path("/tmp") / f"relevo-test-{os.getpid()}"
    short.symlink_to(folder)
    ray_token = folder / "ray_token"
    ray_token.write_text("0" * 64)
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(ray_token)}
    environment["RAY_ADDRESS"] = ""
    command = [str(BIN / "ray"), "start", "--head", "--block", "--num-cpus=2"]
    command += [f"--port={port}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    command += [f"--ray-client-server-port={client}", "--disable-usage-stats"]
    command += [f"--dashboard-agent-listen-port={agent}", f"--temp-dir={short}"]
    with (folder / "ray.log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    handle = psutil.Process(process.pid)
    try:
        wait_until(lambda: is_taken(port) and is_taken(dashboard), folder / "ray.log")
        yield Head(
            process=handle,
            address=f"127.0.0.1:{port}",
            dashboard=f"http://127.0.0.1:{dashboard}",
            environment=environment,
            token_file=folder / "token",
            log=folder / "ray.log",
        )
    finally:
        _end(handle)
        process.wait(10)
        short.unlink()


def _end(node: psutil.Process) -> None:
    """Stop a node with all its processes."""
    children = node.children(recursive=True)
    node.send_signal(signal.SIGTERM)
    psutil.wait_procs([node, *children], timeout=15)
    for child in children:
        if child.is_running():
            child.kill()


def wait_until(is_true: Callable[[], bool], log: Path) -> None:
    """Poll; what is in the log is the error."""
    deadline = time.monotonic() + UP_WITHIN_S
    while time.monotonic() < deadline:
        if is_true():
            return
        time.sleep(0.2)
    raise AssertionError(log.read_text())


@contextmanager
def another_node(head: Head, num_cpus: int) -> Iterator[psutil.Process]:
    """A second node of the head's cluster, once it is one."""
    command = [str(BIN / "ray"), "start", f"--address={head.address}", "--block"]
    command += [f"--num-cpus={num_cpus}", "--disable-usage-stats"]
    command += [f"--dashboard-agent-listen-port={free_ports(1)[0]}"]
    environment = {**head.environment, "PYTHONUNBUFFERED": "1"}
    log = head.log.with_name("node.log")
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    handle = psutil.Process(process.pid)
    try:
        wait_until(lambda: "Ray runtime started" in log.read_text(), log)
        yield handle
    finally:
        _end(handle)
        process.wait(10)
