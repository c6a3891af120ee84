"""A client leaves, or its time runs out, in any phase: everything it held is free at once."""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc.aio
import httpx
import pytest
from relevo.v1 import inference_pb2

from tests.asks import PROMPT, every_ask, generation_of
from tests.gated_cluster import GatedCluster
from tests.integration.recovery.conftest import Inject
from tests.patience import naps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# Twice what a quiet machine may take, and far less than the stretched work would. What both ends
# of a link have agreed to move still travels, up to four ranges of half a second here.
WITHIN_S = 2.0
HELD_WITHIN_S = 4.0
BODY = {"prompt": PROMPT * 8, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
# The client's label chooses the phase that is stretched, so that it can be left in its middle.
FAULTS = [
    {
        "point": point,
        "action": "delay",
        "delay_s": delay_s,
        "count": 0,
        "match": {"request_label": label},
    }
    for point, label, delay_s in (
        ("prefill_step", "slow-prefill", 0.5),
        ("kv_send", "slow-transfer", 0.5),
        ("decode_step", "slow-decode", 0.2),
    )
]
Client = Callable[[GatedCluster, str, str], Coroutine[Any, Any, None]]


async def http_whole(cluster: GatedCluster, label: str, salt: str) -> None:
    body = {"model": "tiny", **BODY, "cache_salt": salt}
    await cluster.http.post("/v1/completions", json=body, headers={"x-request-id": label})


async def http_stream(cluster: GatedCluster, label: str, salt: str) -> None:
    body = {"model": "tiny", **BODY, "cache_salt": salt, "stream": True}
    headers = {"x-request-id": label}
    async with cluster.http.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
        async for _ in stream.aiter_bytes():
            pass


async def grpc_whole(cluster: GatedCluster, label: str, salt: str) -> None:
    generation = generation_of({"model": "tiny", **BODY, "cache_salt": salt})
    request = inference_pb2.GenerateRequest(generation=generation)
    await cluster.stub.Generate(request, metadata=(("x-request-id", label),))


async def grpc_stream(cluster: GatedCluster, label: str, salt: str) -> None:
    generation = generation_of({"model": "tiny", **BODY, "cache_salt": salt})
    request = inference_pb2.GenerateStreamRequest(generation=generation)
    async for _ in cluster.stub.GenerateStream(request, metadata=(("x-request-id", label),)):
        pass


CLIENTS: tuple[Client, ...] = (http_whole, http_stream, grpc_whole, grpc_stream)


def total(cluster: GatedCluster, pool: str, field: str) -> int:
    loads = [report.load for report in cluster.upstream.loads() if report.pool == pool]
    return sum(getattr(load, field) for load in loads)


def num_tokens(cluster: GatedCluster) -> list[int]:
    """Tokens of each running request so far."""
    running = cluster.ingress.serving._running.values()
    return [each.stream.report.num_completion_tokens for each in running]


# Each client is in this phase.
PHASES: dict[str, tuple[str, Callable[[GatedCluster], bool]]] = {
    "queued": ("slow-decode", lambda c: c.upstream.num_waiting == len(CLIENTS)),
    "prefill": (
        "slow-prefill",
        lambda c: total(c, "prefill", "num_running") + total(c, "prefill", "num_waiting") == 4,
    ),
    "transfer": ("slow-transfer", lambda c: total(c, "decode", "num_transferring") == len(CLIENTS)),
    "first token": ("slow-transfer", lambda c: num_tokens(c) == [1] * len(CLIENTS)),
    "decode": ("slow-decode", lambda c: sum(count >= 3 for count in num_tokens(c)) == len(CLIENTS)),
}


def is_free(cluster: GatedCluster) -> bool:
    """Nothing runs, waits or travels; blocks held for a peer may still be."""
    loads = [report.load for report in cluster.upstream.loads()]
    return (
        cluster.ingress.serving.num_running == cluster.upstream.num_running == 0
        and cluster.upstream.num_waiting == 0
        and not any(load.num_running or load.num_waiting or load.blocks.used for load in loads)
    )


async def leave_in(cluster: GatedCluster, phase: str) -> None:
    """All four clients reach this phase and leave; what they held is free in time."""
    calls = await _calls_in(cluster, phase)
    for call in calls:
        call.cancel()
    await cluster.until(lambda: is_free(cluster), WITHIN_S)
    if phase != "queued":
        await cluster.until_quiet(HELD_WITHIN_S)
    await asyncio.gather(*calls, return_exceptions=True)


async def _calls_in(cluster: GatedCluster, phase: str) -> list[asyncio.Task[None]]:
    """Four that are in it together; on a busy machine one may be through before the last comes."""
    label, is_reached = PHASES[phase]
    for attempt in range(5):
        calls = [
            asyncio.create_task(client(cluster, label, f"{phase}-{client.__name__}-{attempt}"))
            for client in CLIENTS
        ]
        await cluster.until(lambda: is_reached(cluster) or any(c.done() for c in calls), 20.0)  # noqa: B023
        if not any(call.done() for call in calls):
            return calls
        await asyncio.gather(*calls)
    raise AssertionError(f"never four at once: {phase}")


async def test_who_leaves_in_any_phase_frees_everything_in_time(
    cluster: GatedCluster, inject: Inject
) -> None:
    inject(*FAULTS)
    prefills = [cluster.gates[f"prefill-{number}"] for number in range(2)]
    for phase in PHASES:
        if phase == "queued":
            for gate in prefills:
                gate.cut()
            await cluster.until(lambda: not cluster.upstream.is_ready(), 20.0)
        await leave_in(cluster, phase)
        for gate in prefills:
            gate.open()
        await cluster.until_ready()


async def test_two_hundred_immediate_cancels_leave_no_task_no_block_no_gauge(
    cluster: GatedCluster,
) -> None:
    await asyncio.gather(*(_left_after(client, cluster, 0.5) for client in CLIENTS))
    await cluster.until_quiet()
    num_tasks = len(asyncio.all_tasks())
    rng = random.Random(5)
    await asyncio.gather(
        *(
            _left_after(CLIENTS[number % 4], cluster, rng.choice([0.0, 0.01, 0.1]) * rng.random())
            for number in range(200)
        )
    )
    await cluster.until(lambda: is_free(cluster), 3.0)
    await cluster.until_quiet(HELD_WITHIN_S)
    await cluster.until(lambda: len(asyncio.all_tasks()) <= num_tasks, 3.0)
    # Metrics come with the state, once a second.
    for _ in naps(5.0, 0.2):
        above_zero = [line for line in await _gauges(cluster) if not line.endswith(" 0.0")]
        if not above_zero:
            return
        await asyncio.sleep(0.2)
    raise AssertionError(above_zero)


async def _gauges(cluster: GatedCluster) -> list[str]:
    """What is zero when nothing runs."""
    lines = (await cluster.http.get("/metrics")).text.splitlines()
    names = ("running", "waiting", "transferring")
    wanted = [f"relevo_requests_{name}{{" for name in names] + ["relevo_kv_leases_open{"]
    gauges = [line for line in lines if line.startswith(tuple(wanted))]
    states = [f'state="{state}"' for state in ("used", "held", "quarantined")]
    gauges += [
        line
        for line in lines
        if line.startswith("relevo_kv_blocks{") and any(state in line for state in states)
    ]
    assert len(gauges) >= 4 * 6, gauges
    return gauges


async def _left_after(client: Client, cluster: GatedCluster, delay_s: float) -> None:
    call = asyncio.create_task(client(cluster, "left", f"{random.random()}"))
    await asyncio.sleep(delay_s)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def fails_as(call: Awaitable[Any], code: grpc.StatusCode) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    assert failed.value.code() is code


async def test_a_passed_deadline_ends_the_work_on_both_faces(
    cluster: GatedCluster, inject: Inject
) -> None:
    inject(*FAULTS)
    generation = generation_of({"model": "tiny", **BODY})
    label = (("x-request-id", "slow-decode"),)
    headers = {"x-request-id": "slow-decode", "x-relevo-timeout-s": "0.6"}
    body = {"model": "tiny", **BODY}

    async def whole_over_http() -> httpx.Response:
        return await cluster.http.post("/v1/completions", json=body, headers=headers)

    async def streamed_over_http() -> httpx.Response:
        streamed = body | {"stream": True}
        return await cluster.http.post("/v1/completions", json=streamed, headers=headers)

    async def whole_over_grpc() -> None:
        request = inference_pb2.GenerateRequest(generation=generation)
        call = cluster.stub.Generate(request, metadata=label, timeout=0.6)
        await fails_as(call, grpc.StatusCode.DEADLINE_EXCEEDED)

    async def streamed_over_grpc() -> None:
        request = inference_pb2.GenerateStreamRequest(generation=generation)
        call = cluster.stub.GenerateStream(request, metadata=label, timeout=0.6)

        async def read() -> None:
            async for _ in call:
                pass

        await fails_as(read(), grpc.StatusCode.DEADLINE_EXCEEDED)

    started_at_s = time.monotonic()
    whole, streamed, _, _ = await asyncio.gather(
        whole_over_http(), streamed_over_http(), whole_over_grpc(), streamed_over_grpc()
    )
    assert time.monotonic() - started_at_s < 0.6 + 5 * WITHIN_S
    await cluster.until(lambda: is_free(cluster), WITHIN_S)
    assert (whole.status_code, whole.json()["error"]["type"]) == (504, "timeout_error")
    events = [e for e in streamed.text.split("\n\n") if e.startswith("data: ")]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["type"] == "timeout_error"
    await cluster.until_quiet()


async def test_requests_of_one_label_share_nothing(cluster: GatedCluster) -> None:
    asks = [ask for ask in every_ask("??") if ask.name in {"plain", "choices", "min_tokens"}]
    alone = [await ask.send(cluster.http, cluster.stub, salt=f"{ask.label}-alone") for ask in asks]
    together = await asyncio.gather(
        *(ask.send(cluster.http, cluster.stub, salt=ask.label, label="same") for ask in asks)
    )
    assert list(together) == alone
    await cluster.until_quiet()
