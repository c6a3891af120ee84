"""The shipped Serve file on a Ray cluster of three nodes: each pool on its own, KV between them."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from cluster.server_process import free_ports
from rpc.token import create_token
from tests.long_form import LONG_FORM
from tests.ray_nodes import RayNodes, replicas
from tests.served_cluster import SMALL, is_taken

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240), *LONG_FORM]

SERVE = Path(sys.executable).with_name("serve")
SHIPPED = Path(__file__).resolve().parents[2] / "deploy" / "serve.yaml"
UP_WITHIN_S = 120.0
NUM_CPUS = {"ingress": 2, "prefill": 1, "decode": 3}  # a node each; the head has the ingress


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    short = Path("/tmp") / f"relevo-three-{os.getpid()}"  # Ray's sockets need a short path
    short.symlink_to(tmp_path_factory.mktemp("nodes"))
    create_token(short / "token")
    try:
        yield short
    finally:
        short.unlink()


@pytest.fixture(scope="module")
def nodes(folder: Path) -> Iterator[RayNodes]:
    roles = iter(NUM_CPUS.items())
    role, num_cpus = next(roles)
    found = RayNodes.start(folder, num_cpus=num_cpus, labels={"role": role})
    try:
        for role, num_cpus in roles:
            found.add(num_cpus=num_cpus, labels={"role": role})
        yield found
    finally:
        found.stop()


def _wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + UP_WITHIN_S
    while not is_true():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.2)


def _serve_file(folder: Path, model: Path, http_port: int, grpc_port: int) -> Path:
    """The shipped file with our ports, labels and model, its keys in a file that every node has."""
    tree = yaml.safe_load(SHIPPED.read_text())
    args = tree["applications"][0]["args"]
    args["cluster"]["token_file"] = str(folder / "token")
    args["ingress"] = {"http_port": http_port, "grpc_port": grpc_port}
    args["model"] = {"path": str(model)}
    for key in SMALL:
        section, _, assignment = key.partition(".")
        name, _, value = assignment.partition("=")
        args.setdefault(section, {})[name] = yaml.safe_load(value)
    for role in NUM_CPUS:
        args[role]["node_labels"] = {"role": role}
    # Every request is handed over, as between machines that share no memory.
    args["router"] = {"local_prefill": "never"}
    args["kv_transfer"]["backend"] = "gloo"
    (folder / "relevo.yaml").write_text(yaml.safe_dump(args))
    tree["applications"][0]["args"] = {"config_file": str(folder / "relevo.yaml")}
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def test_each_pool_stands_on_its_node_and_kv_flows_between_them(
    nodes: RayNodes, folder: Path, tiny_model: Path
) -> None:
    http_port, grpc_port = free_ports(2)
    url, address = f"http://127.0.0.1:{http_port}", ["--address", nodes.dashboard]
    file = _serve_file(folder, tiny_model, http_port, grpc_port)
    done = subprocess.run(
        [SERVE, "deploy", file, *address],
        env=nodes.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    def moved_bytes() -> float:
        lines = httpx.get(f"{url}/metrics", timeout=10).text.splitlines()
        found = [line for line in lines if line.startswith("relevo_kv_transfer_bytes_total")]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    try:
        _wait_until(
            lambda: is_taken(http_port) and httpx.get(f"{url}/ready", timeout=10).is_success
        )
        body = {"model": "tiny", "prompt": "The quick brown fox", "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/completions", json=body | {"temperature": 0}, timeout=60)
        assert answer.json()["choices"][0]["text"], answer.text
        assert [replicas(raylet) for raylet in nodes.raylets] == [
            ["Ingress"],
            ["PrefillWorker"],
            ["DecodeWorker"],
        ]
        workers = httpx.get(f"{url}/v1/status", timeout=10).json()["workers"]
        assert len({worker["node"] for worker in workers}) == 2
        links = [link for worker in workers for link in worker["links"]]
        assert {(link["state"], link["backend"]) for link in links} == {("ready", "gloo")}
        _wait_until(lambda: moved_bytes() > 0)  # workers report once a second
    finally:
        subprocess.run([SERVE, "shutdown", "-y", *address], env=nodes.environment, check=False)
