"""`relevo serve` with two workers per pool on two cores: a loss is no wait.

`make soak` runs it; in short the scenarios of `tests/chaos` kill workers of such a cluster.
"""

from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.long_form import LONG_FORM
from tests.served_cluster import ServedCluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240), *LONG_FORM]

BODY = {"model": "tiny", "prompt": "The quick brown fox", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def cluster(tiny_model: Path) -> Iterator[ServedCluster]:
    served = ServedCluster.start(
        tiny_model, "prefill.replicas=2", "decode.replicas=2", "router.local_prefill=never"
    )
    try:
        served.wait_until_shown()
        yield served
    finally:
        served.stop()
    assert served.survivors() == []


def ask(cluster: ServedCluster) -> str:
    response = httpx.post(f"{cluster.url}/v1/completions", json=BODY, timeout=60)
    assert response.status_code == httpx.codes.OK, response.text
    return str(response.json()["choices"][0]["text"])


def test_ranks_number_the_workers_of_each_pool(cluster: ServedCluster) -> None:
    workers = {worker["id"]: worker for worker in cluster.status()["workers"]}
    assert set(workers) == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert len({worker["pid"] for worker in workers.values()}) == 4
    links = {
        (worker["id"], link["peer"])
        for worker in workers.values()
        if worker["pool"] == "decode"
        for link in worker["links"]
        if link["state"] == "ready"
    }
    assert len(links) == 4


@pytest.mark.parametrize("worker_id", ["decode-0", "prefill-1"])
def test_requests_go_on_while_a_killed_worker_comes_back(
    cluster: ServedCluster, worker_id: str
) -> None:
    before = ask(cluster)
    worker = cluster.worker(worker_id)
    psutil.Process(worker["pid"]).kill()
    for _ in range(4):
        assert ask(cluster) == before
    # None of them waited for the replacement.
    assert cluster.worker(worker_id)["incarnation"] == worker["incarnation"]
    assert cluster.wait_for(worker_id, other_than=worker["incarnation"]) > worker["incarnation"]
    assert ask(cluster) == before


def test_ctrl_c_leaves_nothing(cluster: ServedCluster) -> None:
    status = cluster.stop(number=2)
    assert status == 0, cluster.output()
    assert cluster.survivors() == []
