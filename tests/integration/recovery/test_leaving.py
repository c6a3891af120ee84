"""A client's time runs out: everything it held is free at once. Labels are labels only."""

import asyncio
import json
import time
from collections.abc import Awaitable
from typing import Any

import grpc.aio
import httpx
import pytest
from relevo.v1 import inference_pb2

from tests.asks import PROMPT, every_ask, generation_of
from tests.gated_cluster import GatedCluster
from tests.integration.recovery.conftest import Inject

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

WITHIN_S = 1.0
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
        ("prefill_step", "slow-prefill", 0.2),
        ("kv_send", "slow-transfer", 0.5),
        ("decode_step", "slow-decode", 0.2),
    )
]


def is_free(cluster: GatedCluster) -> bool:
    """Nothing runs, waits or travels; blocks held for a peer may still be."""
    loads = [report.load for report in cluster.upstream.loads()]
    return (
        cluster.ingress.serving.num_running == cluster.upstream.num_running == 0
        and cluster.upstream.num_waiting == 0
        and not any(load.num_running or load.num_waiting or load.blocks.used for load in loads)
    )


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
    assert time.monotonic() - started_at_s < 0.6 + WITHIN_S
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
