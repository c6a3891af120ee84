"""A Ray cluster that somebody else started: joined by `relevo serve`, used by `serve deploy`."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from cluster.server_process import free_ports
from rpc.token import create_token
from tests.callers import Callers
from tests.long_form import long_form
from tests.served_cluster import SMALL, ServedCluster, is_taken

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]

BIN = Path(sys.executable).parent
DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
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


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    folder = tmp_path_factory.mktemp("head")
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
        _wait_until(lambda: is_taken(port) and is_taken(dashboard), folder / "ray.log")
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


def _wait_until(is_true: object, log: Path) -> None:
    assert callable(is_true)
    deadline = time.monotonic() + UP_WITHIN_S
    while time.monotonic() < deadline:
        if is_true():
            return
        time.sleep(0.2)
    pytest.fail(log.read_text())


def ask(url: str, *, max_tokens: int = 4) -> str:
    body = {"model": "tiny", "prompt": "The quick brown fox", "max_tokens": max_tokens}
    body |= {"temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert response.status_code == httpx.codes.OK, response.text
    return str(response.json()["choices"][0]["text"])


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
        _wait_until(lambda: "Ray runtime started" in log.read_text(), log)
        yield handle
    finally:
        _end(handle)
        process.wait(10)


def test_serve_joins_the_cluster_waits_for_a_node_and_leaves_it_as_it_was(
    head: Head, tiny_model: Path
) -> None:
    cluster = ServedCluster.start(
        tiny_model,
        f"cluster.ray_address={head.address}",
        f"cluster.token_file={head.token_file}",
        "decode.num_cpus=3",
        environment=head.environment,
    )
    try:
        _wait_until(lambda: "decode-0 needs 3 CPU" in cluster.output(), head.log)
        assert cluster.process.poll() is None
        with another_node(head, num_cpus=3) as node:
            cluster.wait_until_shown()
            assert f"joined {head.address}" in cluster.output()
            assert ask(cluster.url)
            assert len(replicas(head.process)) == 2
            assert len(replicas(node)) == 1
            status = cluster.stop()
            assert status == 0, cluster.output()
            assert replicas(node) == []
    finally:
        cluster.stop()
    assert head.process.is_running()
    assert replicas(head.process) == []
    assert not is_taken(cluster.http_port)


def test_serve_deploy_with_the_shipped_file(head: Head, tiny_model: Path, tmp_path: Path) -> None:
    http_port, grpc_port = free_ports(2)
    tree = yaml.safe_load((DEPLOY / "serve.yaml").read_text())
    args = tree["applications"][0]["args"]
    args["cluster"]["token_file"] = str(head.token_file)
    args["ingress"] = {"http_port": http_port, "grpc_port": grpc_port}
    args["model"] = {"path": str(tiny_model)}
    for key in SMALL:
        section, _, assignment = key.partition(".")
        name, _, value = assignment.partition("=")
        args.setdefault(section, {})[name] = yaml.safe_load(value)
    # One stream is more than a twentieth of eight places.
    eager = {"max": 2, "seqs_share": 0.05, "up_delay_s": 0.5, "down_delay_s": 3}
    args.setdefault("decode", {})["autoscaling"] = eager
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(tree))
    serve = [str(BIN / "serve")]
    address = ["--address", head.dashboard]
    done = subprocess.run(
        [*serve, "deploy", str(file), *address],
        env=head.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    url = f"http://127.0.0.1:{http_port}"
    try:
        _wait_until(lambda: is_taken(http_port) and _is_ready(url), file)
        assert ask(url)
        _grow_and_shrink(url, file)
    finally:
        subprocess.run([*serve, "shutdown", "-y", *address], env=head.environment, check=False)


def _grow_and_shrink(url: str, log: Path) -> None:
    """The decode pool follows its load, and says why."""

    def decode_workers() -> list[str]:
        workers = httpx.get(f"{url}/v1/status", timeout=10).json()["workers"]
        return [w["id"] for w in workers if w["pool"] == "decode" and w["state"] == "ready"]

    def has_grown() -> bool:
        ask(url, max_tokens=200)
        return sorted(decode_workers()) == ["decode-0", "decode-1"]

    assert len(decode_workers()) == 1
    _wait_until(has_grown, log)
    scaling = httpx.get(f"{url}/v1/status", timeout=10).json()["scaling"]
    assert scaling.keys() == {"decode"}
    assert "for 8 places a worker" in scaling["decode"]["reason"]
    _wait_until(lambda: len(decode_workers()) == 1, log)
    assert ask(url)


def _is_ready(url: str) -> bool:
    return httpx.get(f"{url}/ready", timeout=10).status_code == httpx.codes.OK


@long_form
@pytest.mark.timeout(900)
def test_a_deployment_is_replaced_and_rolled_back_under_load(
    head: Head, tiny_model: Path, tmp_path: Path
) -> None:
    http_port, grpc_port = free_ports(2)
    url = f"http://127.0.0.1:{http_port}"
    keys = {
        "cluster.ray_address": head.address,
        "cluster.token_file": str(head.token_file),
        "model.path": str(tiny_model),
        "ingress.http_port": str(http_port),
        "ingress.grpc_port": str(grpc_port),
        "prefill.replicas": "2",
        "decode.replicas": "2",
        "engine.num_kv_blocks": "200",
        "decode.drain_s": "15",  # an ingress that goes lets its streams end for so long
    }
    settings = [*SMALL, *(f"{key}={value}" for key, value in keys.items())]

    def relevo(*arguments: str) -> str:
        done = subprocess.run(
            [str(BIN / "relevo"), *arguments, "--history", str(tmp_path)],
            env=head.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def version() -> str:
        answer = httpx.get(f"{url}/version", timeout=10).json()
        return str(answer["config"])

    def deploy(*assignments: str) -> str:
        relevo("deploy", *(f"--set={each}" for each in (*settings, *assignments)))
        return version()

    body = {"model": "tiny", "prompt": "The quick brown fox", "max_tokens": 100, "temperature": 0}
    try:
        first = deploy()
        with Callers(url, 3, body | {"ignore_eos": True}) as callers:
            _wait_until(lambda: len(callers.texts) > 3, head.log)
            second = deploy("engine.max_num_seqs=3")
            num_before = len(callers.texts)
            _wait_until(lambda: len(callers.texts) > num_before + 3, head.log)
            relevo("rollback", "--address", head.address)
            num_before = len(callers.texts)
            _wait_until(lambda: len(callers.texts) > num_before + 3, head.log)
        assert callers.lost == []
        assert len(set(callers.texts)) == 1
        assert version() == first != second
        listed = relevo("rollback", "--list", "--address", head.address)
        assert listed.count(first) == 2
        assert listed.count(second) == 1
    finally:
        address = ["--address", head.dashboard]
        command = [str(BIN / "serve"), "shutdown", "-y", *address]
        subprocess.run(command, env=head.environment, check=False)


@long_form
def test_the_doctor_asks_every_node(head: Head, tiny_model: Path) -> None:
    keys = (f"cluster.ray_address={head.address}", f"model.path={tiny_model}")
    with another_node(head, num_cpus=1):
        done = subprocess.run(
            [str(BIN / "relevo"), "doctor", "--json", *(f"--set={key}" for key in keys)],
            env=head.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    findings = json.loads(done.stdout)["findings"]
    nodes = [each for each in findings if each["check"].startswith("node ")]
    assert len(nodes) == 2, done.stdout + done.stderr
    assert all("the same versions" in each["text"] for each in nodes), nodes
