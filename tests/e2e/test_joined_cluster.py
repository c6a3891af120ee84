"""A Ray cluster that somebody else started: joined by `relevo serve`, used by `serve deploy`."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from cluster.server_process import free_ports
from tests.long_form import long_form
from tests.ray_head import BIN, Head, another_node, ingresses, ray_head, replicas, wait_until
from tests.served_cluster import SMALL, ServedCluster, is_taken

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    with ray_head(tmp_path_factory.mktemp("head")) as started:
        yield started


def ask(url: str, *, max_tokens: int = 4) -> str:
    body = {"model": "tiny", "prompt": "The quick brown fox", "max_tokens": max_tokens}
    body |= {"temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert response.status_code == httpx.codes.OK, response.text
    return str(response.json()["choices"][0]["text"])


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
        wait_until(lambda: "decode-0 needs 3 CPU" in cluster.output(), head.log)
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
    args["ingress"] |= {"replicas": 2, "max_per_node": 2}
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
        wait_until(lambda: is_taken(http_port) and _is_ready(url), file)
        assert ask(url)
        _lose_an_ingress(head.process, url)
        _grow_and_shrink(url, file)
    finally:
        subprocess.run([*serve, "shutdown", "-y", *address], env=head.environment, check=False)


def _lose_an_ingress(node: psutil.Process, url: str) -> None:
    """New connections go to the other one meanwhile."""
    wait_until(lambda: len(ingresses(node)) == 2, Path("/dev/null"))
    ingress = ingresses(node)[0]
    ingress.kill()
    ingress.wait(10)
    for _ in range(4):
        assert ask(url)


def _grow_and_shrink(url: str, log: Path) -> None:
    """The decode pool follows its load, and says why."""

    def decode_workers() -> list[str]:
        workers = httpx.get(f"{url}/v1/status", timeout=10).json()["workers"]
        return [w["id"] for w in workers if w["pool"] == "decode" and w["state"] == "ready"]

    def has_grown() -> bool:
        ask(url, max_tokens=200)
        return sorted(decode_workers()) == ["decode-0", "decode-1"]

    assert len(decode_workers()) == 1
    wait_until(has_grown, log)
    scaling = httpx.get(f"{url}/v1/status", timeout=10).json()["scaling"]
    assert scaling.keys() == {"decode"}
    assert "for 8 places a worker" in scaling["decode"]["reason"]
    wait_until(lambda: len(decode_workers()) == 1, log)
    assert ask(url)


def _is_ready(url: str) -> bool:
    return httpx.get(f"{url}/ready", timeout=10).status_code == httpx.codes.OK


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
