"""Health tells the truth: alive, ready, degraded, and when a slow worker is no dead one."""

import asyncio
import time
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.engine import Engine
from router.config import RouterConfig
from tests.asks import every_ask
from tests.gated_cluster import GatedCluster, gated_cluster
from tests.integration.recovery.conftest import ENGINE, Inject

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def states(cluster: GatedCluster) -> tuple[int, int, str]:
    """/health, /ready and the state of /v1/status."""
    health = await cluster.http.get("/health")
    ready = await cluster.http.get("/ready")
    status = await cluster.http.get("/v1/status")
    return health.status_code, ready.status_code, status.json()["state"]


async def test_readiness_is_a_choice_of_workers_and_health_is_the_process(
    tmp_path: Path, model_path: Path
) -> None:
    router = RouterConfig(local_prefill="auto")
    async with gated_cluster(
        tmp_path, model_path, num_decode=1, router=router, engine=ENGINE
    ) as cluster:
        target = f"127.0.0.1:{cluster.ingress.grpc_port}"
        async with grpc.aio.insecure_channel(target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            told: list[int] = []

            async def watch() -> None:
                async for response in stub.Watch(health_pb2.HealthCheckRequest()):
                    told.append(response.status)

            watching = asyncio.create_task(watch())

            async def check() -> int:
                return int((await stub.Check(health_pb2.HealthCheckRequest())).status)

            assert await states(cluster) == (200, 200, "ready")
            cluster.gates["prefill-0"].cut()
            await cluster.until(lambda: cluster.upstream.status()["state"] == "degraded", 20.0)
            assert await states(cluster) == (200, 200, "degraded")
            assert "prefill-0 is lost" in cluster.upstream.status()["reasons"]
            assert await check() == SERVING
            cluster.gates["decode-0"].freeze()
            await cluster.until(lambda: not cluster.upstream.is_ready(), 20.0)
            assert await states(cluster) == (200, 503, "unavailable")
            assert await check() == NOT_SERVING
            await cluster.until(lambda: told[-1] == NOT_SERVING, 10.0)
            cluster.gates["decode-0"].open()
            cluster.gates["prefill-0"].open()
            await cluster.until_ready()
            assert await states(cluster) == (200, 200, "ready")
            assert await check() == SERVING
            await cluster.until(lambda: told[-1] == SERVING, 10.0)
            assert told[:2] == [SERVING, NOT_SERVING]
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def test_what_a_frozen_worker_tells_after_it_wakes_changes_nothing(
    cluster: GatedCluster,
) -> None:
    asks = [ask for ask in every_ask("??") if ask.name in {"plain", "penalties", "choices"}]
    expected = [await ask.send(cluster.http, cluster.stub, salt=ask.label) for ask in asks]
    for name in ("decode-0", "prefill-0"):
        answering = [
            asyncio.create_task(ask.send(cluster.http, cluster.stub, salt=f"{name}-{ask.label}"))
            for ask in asks
        ]
        await asyncio.sleep(0.15)
        cluster.gates[name].freeze()
        frozen_at_s = time.monotonic()
        answers = await asyncio.gather(*answering)
        assert time.monotonic() - frozen_at_s < 20.0
        # All it had to say, and all that was said to it, goes on now.
        cluster.gates[name].open()
        for ask, answer, told in zip(asks, answers, expected, strict=True):
            answer.usage = (*answer.usage[:2], told.usage[2])
            assert answer == told, (name, ask.label)
        await cluster.until_ready()
        await cluster.until_quiet()


async def test_a_predicted_step_of_five_seconds_is_no_death(
    cluster: GatedCluster, inject: Inject
) -> None:
    ask = next(ask for ask in every_ask("??") if ask.name == "plain")
    expected = await ask.send(cluster.http, cluster.stub, salt="before")
    for name, worker in cluster.workers.items():
        if name.startswith("decode"):
            await worker._engine_loop.call(_expect_steps_of_five_seconds)
    inject({"point": "decode_step", "action": "delay", "delay_s": 5.0, "after": 2})
    started_at_s = time.monotonic()
    answer = await ask.send(cluster.http, cluster.stub, salt="during")
    assert time.monotonic() - started_at_s > 5.0
    assert answer == expected
    assert cluster.upstream.status()["state"] == "ready"
    assert await _num_migrations(cluster) == 0
    await cluster.until_quiet()


def _expect_steps_of_five_seconds(engine: Engine) -> None:
    for _ in range(50):
        engine.rates.observe(num_decodes=1, num_chunk_tokens=0, duration_s=5.0)


async def test_a_slow_network_is_no_death(cluster: GatedCluster) -> None:
    asks = [ask for ask in every_ask("??") if ask.name in {"plain", "penalties"}]
    # A salt each: what one finds in the cache must not depend on who came first.
    expected = [
        await ask.send(cluster.http, cluster.stub, salt=f"before {ask.label}") for ask in asks
    ]
    for gate in cluster.gates.values():
        gate.slow_down(0.3)
    answers = await asyncio.gather(
        *(ask.send(cluster.http, cluster.stub, salt=f"during {ask.label}") for ask in asks)
    )
    assert answers == expected
    assert await _num_migrations(cluster) == 0
    await cluster.until_quiet()


async def _num_migrations(cluster: GatedCluster) -> float:
    text = (await cluster.http.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("relevo_migrations_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
