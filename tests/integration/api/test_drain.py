"""How an ingress ends: not ready at once, nothing new, streams to their end."""

import asyncio
import json

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from relevo.v1 import inference_pb2

from api import shared_port
from api.tokenizer import Tokenizer
from tests.integration.api.conftest import ANSWER, Site, open_site, saying

COMPLETION = {"model": "tiny", "prompt": "hi"}
STREAM = {**COMPLETION, "stream": True}
GENERATION = inference_pb2.Generation(model="tiny", text="hi")


async def stream_over_grpc(site: Site) -> tuple[str, grpc.StatusCode]:
    call = site.stub.GenerateStream(inference_pb2.GenerateStreamRequest(generation=GENERATION))
    text = ""
    try:
        async for message in call:
            text += message.text
    except grpc.aio.AioRpcError:
        pass
    return text, await call.code()


async def stream_over_http(site: Site) -> list[str]:
    response = await site.http.post("/v1/completions", json=STREAM)
    assert response.status_code == 200
    return [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]


async def begin(site: Site) -> tuple[list[asyncio.Task[list[str]]], list[asyncio.Task[object]]]:
    """Four streams that have begun, and end when the router's generations may go on."""
    site.router.may_go_on.clear()
    num_before = len(site.router.generations)
    http = [asyncio.create_task(stream_over_http(site)) for _ in range(2)]
    calls: list[asyncio.Task[object]] = [
        asyncio.create_task(stream_over_grpc(site)) for _ in range(2)
    ]
    async with asyncio.timeout(30):
        while len(site.router.generations) < num_before + 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return http, calls


async def test_a_drain_refuses_at_once_and_ends_when_the_streams_do(
    model_path, tokenizer: Tokenizer
) -> None:  # type: ignore[no-untyped-def]
    async with open_site(model_path, tokenizer, drain_s=20.0) as site:
        http, calls = await begin(site)
        stopping = asyncio.create_task(site.ingress.stop())
        await asyncio.sleep(0)
        assert (await site.http.get("/ready")).status_code == 503
        assert (await site.http.get("/health")).status_code == 200
        health = health_pb2_grpc.HealthStub(site.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        refused = await site.http.post("/v1/completions", json=COMPLETION)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        call = site.stub.Generate(inference_pb2.GenerateRequest(generation=GENERATION))
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert not stopping.done()
        site.router.may_go_on.set()
        for events in await asyncio.gather(*http):
            assert events[-1] == "[DONE]"
            chunks = [json.loads(each) for each in events[:-1]]
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ANSWER
        assert await asyncio.gather(*calls) == [(ANSWER, grpc.StatusCode.OK)] * 2
        await asyncio.wait_for(stopping, 30)
        with pytest.raises(httpx.ConnectError):
            await site.http.get("/health")


async def test_beside_others_it_serves_on_first_and_sends_its_clients_away(
    model_path, tokenizer: Tokenizer
) -> None:  # type: ignore[no-untyped-def]
    async with open_site(model_path, tokenizer, drain_s=20.0, hand_over_s=1.5) as site:
        before = await site.http.post("/v1/completions", json=COMPLETION)
        assert "connection" not in before.headers
        http, calls = await begin(site)  # streams that outlive the hand-over
        stopping = asyncio.create_task(site.ingress.stop())
        await asyncio.sleep(0)
        assert (await site.http.get("/ready")).status_code == 503
        streams_may_go_on, site.router.may_go_on = site.router.may_go_on, asyncio.Event()
        site.router.may_go_on.set()
        answered = await site.http.post("/v1/completions", json=COMPLETION)
        assert answered.status_code == 200
        assert answered.headers["connection"] == "close"
        call = site.stub.Generate(inference_pb2.GenerateRequest(generation=GENERATION))
        assert await call.code() is grpc.StatusCode.OK
        async with asyncio.timeout(30):
            while not site.ingress.serving.is_draining:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        refused = await site.http.post("/v1/completions", json=COMPLETION)
        assert refused.status_code == 503
        streams_may_go_on.set()
        for events in await asyncio.gather(*http):
            assert events[-1] == "[DONE]"
        assert await asyncio.gather(*calls) == [(ANSWER, grpc.StatusCode.OK)] * 2
        await asyncio.wait_for(stopping, 30)


async def test_who_leaves_shared_ports_closes_them_and_serves_who_is_there(
    model_path, tokenizer: Tokenizer
) -> None:  # type: ignore[no-untyped-def]
    settings = {"drain_s": 20.0, "hand_over_s": 2.0, "shares_ports": True}
    async with open_site(model_path, tokenizer, **settings) as site:
        ports = (site.ingress.http_port, site.ingress.grpc_port)
        request = inference_pb2.GenerateRequest(generation=GENERATION)
        await site.http.post("/v1/completions", json=COMPLETION)
        await site.stub.Generate(request)
        stopping = asyncio.create_task(site.ingress.stop())
        async with asyncio.timeout(20):
            while is_open(ports):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        answered = await site.http.post("/v1/completions", json=COMPLETION)
        assert answered.headers["connection"] == "close"
        call = site.stub.Generate(request)
        assert await call.code() is grpc.StatusCode.OK
        # gRPC's connection ends by itself, and with the last one the hand-over.
        await asyncio.wait_for(stopping, 30)
        assert not site.ingress.serving.num_running


def is_open(ports: tuple[int, int]) -> bool:
    listeners = list(shared_port.own_listeners(*ports))
    for listener in listeners:
        listener.close()
    return bool(listeners)


async def test_a_connection_of_grpc_lives_no_longer_than_a_hand_over(
    model_path, tokenizer: Tokenizer
) -> None:  # type: ignore[no-untyped-def]
    async with open_site(model_path, tokenizer, drain_s=1.0, hand_over_s=0.5) as site:
        request = inference_pb2.GenerateRequest(generation=GENERATION)
        await site.stub.Generate(request)
        async with asyncio.timeout(30):
            while shared_port.num_connections(site.ingress.grpc_port):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await site.stub.Generate(request)  # over a new one


async def test_what_outlives_the_drain_ends_in_an_error_that_says_so(
    model_path, tokenizer: Tokenizer
) -> None:  # type: ignore[no-untyped-def]
    async with open_site(model_path, tokenizer, drain_s=0.2) as site:
        site.router.script = saying("ab", end=None)
        http, calls = await begin(site)
        site.router.may_go_on.set()
        await asyncio.wait_for(site.ingress.stop(), 30)
        for events in await asyncio.gather(*http):
            assert "[DONE]" not in events
            assert json.loads(events[-1])["error"]["code"] == "no_workers"
        assert await asyncio.gather(*calls) == [("ab", grpc.StatusCode.UNAVAILABLE)] * 2
        assert all(each.is_closed for each in site.router.generations)


async def test_the_same_ports_can_be_opened_again_at_once(model_path, tokenizer: Tokenizer) -> None:  # type: ignore[no-untyped-def]
    ports = {"http_port": 0, "grpc_port": 0}
    for _ in range(3):
        async with open_site(model_path, tokenizer, **ports) as site:
            ingress = site.ingress
            ports = {"http_port": ingress.http_port, "grpc_port": ingress.grpc_port}
            # Connections that the server closes first: their ports linger in TIME_WAIT.
            assert (await site.http.post("/v1/completions", json=COMPLETION)).status_code == 200
            await site.stub.Generate(inference_pb2.GenerateRequest(generation=GENERATION))
            await ingress.stop()
