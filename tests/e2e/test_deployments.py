"""What runs is replaced, and taken back, while clients ask."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cluster.server_process import free_ports
from tests.long_form import LONG_FORM
from tests.ray_head import BIN, Head, ingresses, ray_head
from tests.served_cluster import SMALL
from tests.steady_clients import steady_clients, wait_until_answered

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900), *LONG_FORM]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    with ray_head(tmp_path_factory.mktemp("head")) as started:
        yield started


def test_a_deployment_is_replaced_and_rolled_back_under_load_without_a_lost_request(
    head: Head, tiny_model: Path, tmp_path: Path
) -> None:
    ports = free_ports(2)
    url = f"http://127.0.0.1:{ports[0]}"
    keys = {
        "cluster.ray_address": head.address,
        "cluster.token_file": str(head.token_file),
        "model.path": str(tiny_model),
        "ingress.http_port": str(ports[0]),
        "ingress.grpc_port": str(ports[1]),
        "ingress.replicas": "2",
        "ingress.max_per_node": "2",
        "prefill.replicas": "2",
        "decode.replicas": "2",
        "engine.num_kv_blocks": "200",
        "decode.drain_s": "16",  # an ingress that goes lets its streams end for so long
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

    def deploy(*assignments: str) -> tuple[str, set[int]]:
        relevo("deploy", *(f"--set={each}" for each in (*settings, *assignments)))
        return deployed()

    def deployed() -> tuple[str, set[int]]:
        """The configuration that serves, and the processes of the ingresses."""
        answer = httpx.get(f"{url}/version", timeout=10).json()
        return str(answer["config"]), {each.pid for each in ingresses(head.process)}

    try:
        first, old = deploy()
        assert len(old) == 2
        with steady_clients((ports[0], ports[1]), max_tokens=40) as clients:
            wait_until_answered(clients, times=5, within_s=60)
            # Of the workers alone; the ingresses stay, and name the new configuration.
            second, kept = deploy("decode.engine.max_num_seqs=3")
            assert kept == old
            third, new = deploy("decode.engine.max_num_seqs=3", "ingress.strict=true")
            assert not new & old
            relevo("rollback", first, "--address", head.address)
            back, last = deployed()
            wait_until_answered(clients, times=5, within_s=60)
        for way, client in clients.items():
            assert client.failures == [], way
        assert len({text for client in clients.values() for text in client.texts}) == 1
        assert len({first, second, third}) == 3
        assert back == first
        assert not last & new
        listed = relevo("rollback", "--list", "--address", head.address)
        assert [listed.count(each) for each in (first, second, third)] == [2, 1, 1]
    finally:
        address = ["--address", head.dashboard]
        command = [str(BIN / "serve"), "shutdown", "-y", *address]
        subprocess.run(command, env=head.environment, check=False)
