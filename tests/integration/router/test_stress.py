"""Workers under stress: replaced one by one, asked for too much, knocked at by strangers.

One set of worker processes for the module.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from relevo.v1 import common_pb2

from cluster.server_process import free_ports
from router.config import RouterConfig
from router.discovery import StaticDiscovery
from router.generation import Generation
from router.request import RoutedRequest
from router.router import Router
from rpc.channel import ChannelPool
from rpc.config import RpcConfig
from rpc.token import read_token
from telemetry.metrics import Metrics
from telemetry.prometheus_sink import PrometheusSink
from tests.cluster_processes import REPOSITORY, ClusterProcesses, WorkerProcess
from tests.hostile import knock, listening
from tests.long_form import long_form
from tests.patience import until
from tests.relay import open_ingress
from tests.served_cluster import is_taken
from tests.shared_files import shared_by, still_there
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

WORKERS = ("decode-0", "decode-1", "prefill-0")
DRAIN_S = 5.6  # so what runs for longer than 0.6 s goes on elsewhere
# Each step of a decode worker takes longer, so that streams outlive a drain.
SLOW = (
    '[{"point": "decode_step", "action": "delay", "delay_s": 0.04, "count": 0,'
    ' "match": {"pool": "decode"}}]'
)
ENVIRONMENT = {"RELEVO_TESTING": "1", "RELEVO_FAULT_PLAN": SLOW}
PROMPTS = [[(7 * n + shift) % 300 + 3 for n in range(60)] for shift in range(4)]
NUM_TOKENS = 80


class Site:
    """Worker processes on fixed ports, and a router that follows them."""

    def __init__(self, processes: ClusterProcesses) -> None:
        self.processes = processes
        self.ports = dict(zip(WORKERS, free_ports(len(WORKERS)), strict=True))
        self.discovery = StaticDiscovery([])
        self.sink = PrometheusSink()

    def start(self, worker_id: str) -> WorkerProcess:
        pool, _, rank = worker_id.partition("-")
        port = self.ports[worker_id]
        config = {"drain_s": DRAIN_S, "rpc": {"port_range": f"{port}-{port}"}}
        return self.processes.start(
            pool,
            int(rank),
            engine={"num_kv_blocks": 256},
            config=config,
            environment=ENVIRONMENT,
        )

    def describe(self) -> None:
        newest = [self.processes.newest(worker_id) for worker_id in WORKERS]
        self.discovery.workers[:] = [each.described for each in newest if each is not None]

    def migrations(self, cause: str) -> float:
        return sum(
            sample.value
            for sample in self.sink.samples()
            if sample.name == "relevo_migrations_total" and sample.labels == {"cause": cause}
        )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("workers")
    processes = ClusterProcesses(folder, make_tiny_model(folder / "model"))
    site = Site(processes)
    try:
        for worker in [site.start(worker_id) for worker_id in WORKERS]:
            processes.wait_for(worker)
        site.describe()
        yield site
    finally:
        shared = shared_by(worker.process.pid for worker in processes.workers)
        processes.stop_all()
    assert not any(map(is_taken, site.ports.values()))
    assert still_there(shared) == []


@asynccontextmanager
async def routed(site: Site, **config: object) -> AsyncIterator[Router]:
    channels = ChannelPool(token=read_token(site.processes.token_file), config=RpcConfig())
    router = Router(
        RouterConfig(**config),  # type: ignore[arg-type]
        site.discovery,
        channels,
        ingress_id="ingress",
        metrics=Metrics(site.sink),
    )
    await router.start()
    try:
        await until(lambda: router.status()["state"] == "ready", 60.0)
        yield router
    finally:
        await router.stop()
        await channels.close()


def start(router: Router, number: int) -> Generation:
    params = common_pb2.SamplingParams(
        max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, top_p=1.0, seed=number
    )
    return router.generate(
        RoutedRequest(
            request_id=f"request-{time.monotonic_ns()}",
            token_ids=PROMPTS[number],
            sampling=params,
            timeout_s=120.0,
        )
    )


async def collect(generation: Generation) -> list[int]:
    try:
        return [token async for batch in generation for token in batch.token_ids]
    finally:
        await generation.aclose()


async def generate(router: Router, number: int) -> list[int]:
    return await collect(start(router, number))


def replace(site: Site, worker_id: str) -> float:
    """End a worker as an operator would, start the next one on its port; how long the end took."""
    old = site.processes.newest(worker_id)
    assert old is not None
    below = psutil.Process(old.process.pid).children(recursive=True)
    started_s = time.monotonic()
    old.signal(signal.SIGTERM)
    assert old.process.wait(DRAIN_S + 20.0) == 0, old.stderr()
    took_s = time.monotonic() - started_s
    assert [each for each in below if each.is_running()] == []
    site.processes.wait_for(site.start(worker_id))
    site.describe()
    return took_s


@long_form
async def test_every_worker_is_replaced_under_load_and_no_request_is_lost(site: Site) -> None:
    async with routed(site) as router:
        expected = await asyncio.gather(*(generate(router, number) for number in range(4)))
        assert {len(tokens) for tokens in expected} == {NUM_TOKENS}
        is_over, answers = asyncio.Event(), []

        async def client(number: int) -> None:
            while not is_over.is_set():
                answers.append(await generate(router, number) == expected[number])

        clients = [asyncio.create_task(client(number)) for number in range(4)]
        took_s = []
        for worker_id in WORKERS:
            took_s.append(await asyncio.to_thread(replace, site, worker_id))
            await until(lambda: router.status()["state"] == "ready", 60.0)
        is_over.set()
        await asyncio.gather(*clients)
        assert answers == [True] * len(answers)
        assert len(answers) >= 4
        # Streams longer than the drain went on elsewhere, and the drain kept its bound.
        assert site.migrations("migrate") >= 1
        assert max(took_s) < DRAIN_S + 5.0
        await until(
            lambda: all(
                report.load.blocks.used + report.load.blocks.held == 0 for report in router.loads()
            ),
            5.0,
        )


async def test_three_times_too_much_costs_little_of_what_is_served(site: Site) -> None:
    opening = open_ingress(
        site.discovery.workers,
        RouterConfig(max_waiting_requests=8),
        model_path=site.processes.model_path,
        token_file=site.processes.token_file,
    )
    async with opening as ingress:
        await until(ingress.serving.is_ready, 60.0)
        rss_before = psutil.Process().memory_info().rss
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.overload", "--seconds", "4", "--saturating", "16"),
            *("--url", f"http://127.0.0.1:{ingress.http_port}"),
            stdout=asyncio.subprocess.PIPE,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'protos'}"},
        )
        output, _ = await process.communicate()
        result = json.loads(output)
        assert result["failed"] == 0, result
        # With slack for what runs beside it, in one part of it more than in the other; the promised
        # 0.85, 100 ms and 2 s are the bench's.
        assert result["offered_over_served"] >= 1.5, result
        assert result["refused"] > 0, result
        assert result["ratio"] >= 0.5, result
        assert result["refusal_p50_ms"] < 1000, result
        assert result["recovered_after_s"] < 10, result
        assert psutil.Process().memory_info().rss - rss_before < 64 << 20


async def test_strangers_at_every_port_get_nothing(site: Site, tmp_path: Path) -> None:
    newest = [site.processes.newest(worker_id) for worker_id in WORKERS]
    workers = [psutil.Process(each.process.pid) for each in newest if each is not None]
    assert len(workers) == len(WORKERS)
    touched, body = tmp_path / "touched", {"model": "tiny", "prompt": "Once", "max_tokens": 4}
    opening = open_ingress(
        site.discovery.workers,
        RouterConfig(local_prefill="never"),
        model_path=site.processes.model_path,
        token_file=site.processes.token_file,
    )
    # A few threads of gRPC's pool may come and go; one for each stranger would be a way in.
    async with opening as ingress:
        url = f"http://127.0.0.1:{ingress.http_port}"
        async with httpx.AsyncClient(base_url=url, timeout=30, verify=False) as http:

            async def ask() -> str:
                answer = await http.post("/v1/completions", json={**body, "temperature": 0})
                assert answer.status_code == 200, answer.text
                return str(answer.json()["choices"][0]["text"])

            await until(ingress.serving.is_ready, 60.0)
            expected = await ask()
            found = listening(workers)
            assert set(found.values()) == {"127.0.0.1"}
            assert set(site.ports.values()) <= set(found)
            threads = {each.pid: each.num_threads() for each in workers}
            ports = (*found, ingress.http_port, ingress.grpc_port)
            knocking = asyncio.create_task(knock(ports, touched))
            while not knocking.done():
                assert await ask() == expected
            await knocking
            assert await ask() == expected
        await until(lambda: all(p.num_threads() <= threads[p.pid] + 8 for p in workers), 10.0)
    assert not touched.exists()
    assert all(each.is_running() for each in workers)


async def test_a_second_sigterm_forces_and_the_stream_goes_on_elsewhere(site: Site) -> None:
    async with routed(site, local_prefill="never") as router:
        expected = await generate(router, 1)
        generation = start(router, 1)
        tokens = (await anext(generation)).token_ids
        while len(tokens) < 5:
            tokens = tokens + (await anext(generation)).token_ids
        worker = site.processes.newest(generation.report.decode_worker_id)
        assert worker is not None
        worker.signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        started_s = time.monotonic()
        worker.signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.process.wait, 10.0) == 0
        assert time.monotonic() - started_s < DRAIN_S
        assert tokens + await collect(generation) == expected
        assert generation.report.num_migrations == 1
