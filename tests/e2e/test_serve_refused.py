"""Starts that must end early, with one clear line."""

import socket
import sys
import time
from pathlib import Path

import pytest

from cluster.server_process import free_ports
from rpc.token import create_token
from tests.served_cluster import ServedCluster

pytestmark = [pytest.mark.timeout(240)]

REFUSED_WITHIN_S = 30.0  # a quiet machine needs two; a cluster that starts would take longer


def refused(cluster: ServedCluster) -> str:
    """Wait for the end of a start that never reaches Ray; return its one line."""
    started_s = time.monotonic()
    status = cluster.wait(90)
    assert time.monotonic() - started_s < REFUSED_WITHIN_S
    assert status == 2
    assert not any(" ray " in line for _, line in cluster.lines), cluster.output()
    (line,) = [line for _, line in cluster.errors]
    assert line.startswith("relevo serve: ")
    return line


@pytest.mark.parametrize("taken", [0, 1])
def test_a_taken_port(tiny_model: Path, taken: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as blocker, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ports = [blocker.getsockname()[1], free.getsockname()[1]]
        free.close()
        ordered = (ports[taken], ports[1 - taken])
        line = refused(ServedCluster.start(tiny_model, ports=ordered))
    key = ("ingress.http_port", "ingress.grpc_port")[taken]
    assert f"port {ports[0]} on 127.0.0.1 is taken" in line
    assert key in line


def test_a_missing_model() -> None:
    line = refused(ServedCluster.start(Path("/no/such/model")))
    assert line == "relevo serve: model.path /no/such/model does not exist"


def test_a_bad_key(tiny_model: Path) -> None:
    line = refused(ServedCluster.start(tiny_model, "decode.replcas=2"))
    assert "unknown config key 'decode.replcas' in --set" in line
    assert "did you mean 'decode.replicas'?" in line


def test_a_bad_environment_variable(tiny_model: Path) -> None:
    environment = {"RELEVO__ENGINE__BLOCKSIZE": "16"}
    line = refused(ServedCluster.start(tiny_model, environment=environment))
    assert "'engine.blocksize' in the environment; did you mean 'engine.block_size'?" in line


def test_a_cluster_that_is_not_there(tiny_model: Path, tmp_path: Path) -> None:
    create_token(tmp_path / "token")
    (port,) = free_ports(1)
    line = refused(
        ServedCluster.start(
            tiny_model,
            f"cluster.ray_address=127.0.0.1:{port}",
            f"cluster.token_file={tmp_path / 'token'}",
        )
    )
    assert f"cannot join the Ray cluster at 127.0.0.1:{port}: Connection refused" in line


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_replica_that_fits_no_machine(tiny_model: Path) -> None:
    cluster = ServedCluster.start(tiny_model, "prefill.num_cpus=64", "decode.num_gpus=512")
    assert cluster.wait(200) == 1
    ray_up_s = next(
        at_s for at_s, line in cluster.lines if line.split()[2:4] == ["ray", "started:"]
    )
    ((error_s, line),) = cluster.errors
    assert error_s - ray_up_s < REFUSED_WITHIN_S
    assert "prefill-0 needs 64 CPU" in line
    assert "decode-0 needs 512 GPU" in line
    assert cluster.survivors() == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_runs_after_a_refusal(tiny_model: Path) -> None:
    cluster = ServedCluster.start(tiny_model, "decode.replcas=2")
    cluster.wait(90)
    assert cluster.survivors() == []
