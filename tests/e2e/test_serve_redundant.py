"""`relevo serve` with two workers per pool on two cores: a loss is no wait.

The last test but one is a storm of requests, cancels, kills and freezes. Its long form:
`make soak MINUTES=10 SEED=1`.
"""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from tests.served_cluster import ServedCluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]

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


@dataclass(slots=True)
class Storm:
    """Clients that ask the same greedy questions over and over while workers die and freeze."""

    cluster: ServedCluster
    expected: dict[str, str]
    seed: int
    is_over: threading.Event = field(default_factory=threading.Event)
    wrong: list[str] = field(default_factory=list)
    num_answers: int = 0

    def client(self, number: int) -> None:
        """Ask, and now and then hang up in the middle."""
        rng = random.Random(f"{self.seed}-{number}")
        with httpx.Client(base_url=self.cluster.url, timeout=120) as http:
            while not self.is_over.is_set():
                prompt = rng.choice(sorted(self.expected))
                if rng.random() < 0.2:
                    self.hang_up(http, prompt)
                else:
                    self.ask(http, prompt)
                time.sleep(rng.random() * 0.3)

    def ask(self, http: httpx.Client, prompt: str) -> None:
        """An accepted request is answered, with the tokens it always gets."""
        response = http.post("/v1/completions", json=BODY | {"prompt": prompt, "max_tokens": 24})
        if response.status_code != httpx.codes.OK:
            self.wrong.append(f"{response.status_code}: {response.text[:200]}")
        elif response.json()["choices"][0]["text"] != self.expected[prompt]:
            self.wrong.append(f"other tokens for {prompt!r}: {response.text[:300]}")
        self.num_answers += 1

    def hang_up(self, http: httpx.Client, prompt: str) -> None:
        """Cancel by closing the connection."""
        body = BODY | {"prompt": prompt, "max_tokens": 200, "stream": True, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines(), None)

    def strike(self, rng: random.Random) -> None:
        """Kill or freeze one worker, of a pool in which both are well."""
        workers = [each for each in self.cluster.status()["workers"] if each["state"] == "ready"]
        pools = [each["pool"] for each in workers]
        struck = rng.choice(sorted(each["id"] for each in workers) or [""])
        for worker in workers:
            if worker["id"] != struck or pools.count(worker["pool"]) < 2:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(worker["pid"])
                if rng.random() < 0.5:
                    process.send_signal(signal.SIGSTOP)
                    time.sleep(4)
                    process.send_signal(signal.SIGCONT)
                else:
                    process.kill()


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_no_request_is_lost_or_changed_in_a_storm(cluster: ServedCluster) -> None:
    minutes = float(os.environ.get("RELEVO_SOAK_MINUTES", "0.4"))
    seed = int(os.environ.get("RELEVO_SOAK_SEED", "1"))
    prompts = ["The quick brown fox", "Say hello to the world. " * 3, "In the beginning " * 8]
    expected = {}
    for prompt in prompts:
        body = BODY | {"prompt": prompt, "max_tokens": 24}
        response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
        expected[prompt] = response.json()["choices"][0]["text"]
    storm = Storm(cluster, expected, seed)
    clients = [threading.Thread(target=storm.client, args=(number,)) for number in range(4)]
    rng = random.Random(seed)
    end_s = time.monotonic() + 60 * minutes
    for client in clients:
        client.start()
    while time.monotonic() < end_s:
        time.sleep(rng.uniform(2, 6))
        storm.strike(rng)
    storm.is_over.set()
    for client in clients:
        client.join(timeout=150)
        assert not client.is_alive()
    assert storm.wrong == []
    assert storm.num_answers > 0
    _assert_nothing_is_held(cluster)


def _assert_nothing_is_held(cluster: ServedCluster) -> None:
    deadline = time.monotonic() + 90
    while True:
        workers = [each for each in cluster.status()["workers"] if each["state"] != "lost"]
        blocks = [each["kv"] for each in workers if each["state"] == "ready"]
        held = sum(kv["used"] + kv["held"] + kv["quarantined"] for kv in blocks)
        if len(blocks) == 4 and held == 0:
            return
        assert time.monotonic() < deadline, workers
        time.sleep(0.5)


def test_ctrl_c_leaves_nothing(cluster: ServedCluster) -> None:
    status = cluster.stop(number=2)
    assert status == 0, cluster.output()
    assert cluster.survivors() == []
