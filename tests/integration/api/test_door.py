"""An overloaded ingress refuses before it reads what it could only refuse later, on both faces."""

import asyncio

import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from relevo.v1 import inference_pb2

from router.request import Tenant
from tests.integration.api.conftest import KEY, Site

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
GENERATION = inference_pb2.Generation(model="tiny", text="hi", max_tokens=4)
CHAT = inference_pb2.Chat(
    messages=[inference_pb2.ChatMessage(role="user", content="hi")],
    generation=inference_pb2.Generation(model="tiny", max_tokens=4),
)
URGENT_COMPLETION = {"model": "tiny", "prompt": "hi", "max_tokens": 4, "priority": -1}


def only_ordinary_is_full(_: Tenant, priority: int) -> bool:
    return priority == 0


async def grpc_refusal(call: grpc.aio.Call) -> grpc.aio.AioRpcError:
    answer = call.read() if isinstance(call, grpc.aio.UnaryStreamCall) else call
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    return caught.value


@pytest.mark.parametrize("path", PATHS)
async def test_a_full_queue_refuses_over_http_without_a_look_at_the_body(
    site: Site, path: str
) -> None:
    site.router.is_full = only_ordinary_is_full
    refused = await site.http.post(path, content=b"{ this is no JSON")
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "7"
    assert refused.headers["x-request-id"]
    assert "rate_limit" in refused.json()["error"]["type"]
    assert not site.router.generations


async def test_the_connection_of_who_was_refused_serves_the_next_request(site: Site) -> None:
    site.router.is_full = only_ordinary_is_full
    body = {"model": "tiny", "prompt": "word " * 50_000}
    assert (await site.http.post("/v1/completions", json=body)).status_code == 429
    site.router.is_full = lambda *_: False
    answer = await site.http.post("/v1/completions", json=URGENT_COMPLETION)
    assert answer.status_code == 200


@pytest.mark.parametrize("name", ['"priority"', r'"\u0070riority"', r'"priorit\u0079"'])
async def test_whoever_asks_for_another_class_is_let_through(site: Site, name: str) -> None:
    site.router.is_full = only_ordinary_is_full
    body = f'{{"model": "tiny", "prompt": "hi", "max_tokens": 4, {name}: -1}}'
    answer = await site.http.post("/v1/completions", content=body.encode())
    assert answer.status_code == 200, answer.text
    assert [each.request.priority for each in site.router.generations] == [-1]


async def test_what_is_no_generation_is_answered(site: Site) -> None:
    site.router.is_full = lambda *_: True
    for path in ("/health", "/ready", "/metrics", "/v1/status", "/v1/models", "/v1/loads"):
        assert (await site.http.get(path)).status_code == 200, path
    tokens = await site.http.post("/tokenize", json={"model": "tiny", "prompt": "hi"})
    assert tokens.status_code == 200
    await site.stub.Tokenize(inference_pb2.TokenizeRequest(text="hi"))
    await site.stub.GetModelInfo(inference_pb2.GetModelInfoRequest())


async def test_a_full_queue_refuses_over_grpc_in_the_same_words(site: Site) -> None:
    site.router.is_full = only_ordinary_is_full
    http = await site.http.post("/v1/completions", json={"model": "tiny", "prompt": "hi"})
    for call in (
        site.stub.Generate(inference_pb2.GenerateRequest(generation=GENERATION)),
        site.stub.GenerateStream(inference_pb2.GenerateStreamRequest(generation=GENERATION)),
        site.stub.Chat(inference_pb2.ChatRequest(chat=CHAT)),
        site.stub.ChatStream(inference_pb2.ChatStreamRequest(chat=CHAT)),
        # Not even its words are looked at.
        site.stub.Generate(inference_pb2.GenerateRequest()),
    ):
        refused = await grpc_refusal(call)
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.details() == http.json()["error"]["message"]
        status = rpc_status.from_call(refused)
        retry = error_details_pb2.RetryInfo()
        assert any(each.Unpack(retry) for each in status.details)
        assert retry.retry_delay.ToMilliseconds() == 7000
    assert not site.router.generations


async def test_another_class_is_served_over_grpc(site: Site) -> None:
    site.router.is_full = only_ordinary_is_full
    urgent = inference_pb2.Generation(model="tiny", text="hi", max_tokens=4, priority=-1)
    await site.stub.Generate(inference_pb2.GenerateRequest(generation=urgent))
    chat = inference_pb2.Chat(messages=CHAT.messages, generation=CHAT.generation)
    chat.generation.priority = 5
    await site.stub.Chat(inference_pb2.ChatRequest(chat=chat))
    assert [each.request.priority for each in site.router.generations] == [-1, 5]


async def test_without_a_key_the_door_says_nothing_of_the_load(locked_site: Site) -> None:
    asked: list[Tenant] = []

    def is_full(tenant: Tenant, _: int) -> bool:
        asked.append(tenant)
        return True

    locked_site.router.is_full = is_full
    refused = await locked_site.http.post("/v1/completions", json=URGENT_COMPLETION)
    assert refused.status_code == 401
    call = locked_site.stub.Generate(inference_pb2.GenerateRequest(generation=GENERATION))
    assert (await grpc_refusal(call)).code() is grpc.StatusCode.UNAUTHENTICATED
    assert not asked
    headers = {"authorization": f"Bearer {KEY}"}
    full = await locked_site.http.post("/v1/messages", json={}, headers=headers)
    assert full.status_code == 429
    assert {each.name for each in asked} == {asked[0].name} != {""}


async def test_an_ingress_that_ends_says_that_instead(site: Site) -> None:
    site.router.is_full = lambda *_: True
    site.ingress.serving.is_draining = True
    answer = await site.http.post("/v1/completions", json=URGENT_COMPLETION)
    assert answer.status_code == 503
    call = site.stub.Generate(inference_pb2.GenerateRequest(generation=GENERATION))
    assert (await grpc_refusal(call)).code() is grpc.StatusCode.UNAVAILABLE


async def test_room_that_came_while_the_body_arrived_is_taken(site: Site) -> None:
    told = iter([True])
    site.router.is_full = lambda *_: next(told, False)
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 4}
    answers = await asyncio.gather(site.http.post("/v1/completions", json=body))
    assert [each.status_code for each in answers] == [200]
