"""What a request cost, told by every face: the same numbers whole and streamed, exact sums."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from relevo.v1 import inference_pb2

from tests.integration.api.conftest import ANSWER, Site, saying, tokens_of

HI = [{"role": "user", "content": "hi"}]
OPTIONS = {"include_usage": True, "continuous_usage_stats": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Usage in one face's words, taken apart."""

    prompt_tokens: int  # those from a cache too
    cached_tokens: int
    completion_tokens: int
    total_tokens: int
    times: dict[str, float]


TIMES = ("queue_time", "prompt_time", "completion_time", "total_time", "kv_transfer_time")


def openai_cost(usage: dict[str, Any]) -> Cost:
    return Cost(
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        completion_tokens=usage["completion_tokens"],
        total_tokens=usage["total_tokens"],
        times={name: usage[name] for name in TIMES},
    )


def responses_cost(usage: dict[str, Any]) -> Cost:
    return Cost(
        prompt_tokens=usage["input_tokens"],
        cached_tokens=usage["input_tokens_details"]["cached_tokens"],
        completion_tokens=usage["output_tokens"],
        total_tokens=usage["total_tokens"],
        times={name: usage[name] for name in TIMES},
    )


def anthropic_cost(usage: dict[str, Any]) -> Cost:
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    prompt += usage["cache_creation_input_tokens"]
    return Cost(
        prompt_tokens=prompt,
        cached_tokens=usage["cache_read_input_tokens"],
        completion_tokens=usage["output_tokens"],
        total_tokens=prompt + usage["output_tokens"],  # their API has none
        times={name: usage[name] for name in TIMES},
    )


def grpc_cost(usage: inference_pb2.Usage) -> Cost:
    return Cost(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,  # it has none
        times={name: getattr(usage, f"{name}_s") for name in TIMES},
    )


async def events(site: Site, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await site.http.post(path, json={"model": "tiny", **body, "stream": True})
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def whole(site: Site, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = (await site.http.post(path, json={"model": "tiny", **body})).json()
    return answer


async def completion(site: Site, *, stream: bool) -> Cost:
    body: dict[str, Any] = {"prompt": "hi"}
    if not stream:
        return openai_cost((await whole(site, "/v1/completions", body))["usage"])
    chunks = await events(site, "/v1/completions", {**body, "stream_options": OPTIONS})
    # So far, in every chunk: never less than before, and the last one's is the whole.
    so_far = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert so_far == sorted(so_far)
    assert chunks[-1]["choices"] == []
    return openai_cost(chunks[-1]["usage"])


async def chat(site: Site, *, stream: bool) -> Cost:
    body: dict[str, Any] = {"messages": HI}
    if not stream:
        return openai_cost((await whole(site, "/v1/chat/completions", body))["usage"])
    options = {"stream_options": {"include_usage": True}}
    chunks = await events(site, "/v1/chat/completions", {**body, **options})
    return openai_cost(chunks[-1]["usage"])


async def responses(site: Site, *, stream: bool) -> Cost:
    body = {"input": "hi"}
    if not stream:
        return responses_cost((await whole(site, "/v1/responses", body))["usage"])
    return responses_cost((await events(site, "/v1/responses", body))[-1]["response"]["usage"])


async def messages(site: Site, *, stream: bool) -> Cost:
    body = {"messages": HI, "max_tokens": 50}
    if not stream:
        return anthropic_cost((await whole(site, "/v1/messages", body))["usage"])
    return anthropic_cost((await events(site, "/v1/messages", body))[-2]["usage"])


async def generate(site: Site, *, stream: bool) -> Cost:
    generation = inference_pb2.Generation(model="tiny", text="hi")
    if not stream:
        request = inference_pb2.GenerateRequest(generation=generation)
        return grpc_cost((await site.stub.Generate(request)).usage)
    asked = inference_pb2.GenerateStreamRequest(generation=generation)
    *_, last = [message async for message in site.stub.GenerateStream(asked)]
    return grpc_cost(last.usage)


async def grpc_chat(site: Site, *, stream: bool) -> Cost:
    message = inference_pb2.Chat(
        messages=[inference_pb2.ChatMessage(role="user", content="hi")],
        generation=inference_pb2.Generation(model="tiny"),
    )
    if not stream:
        return grpc_cost((await site.stub.Chat(inference_pb2.ChatRequest(chat=message))).usage)
    asked = inference_pb2.ChatStreamRequest(chat=message)
    *_, last = [piece async for piece in site.stub.ChatStream(asked)]
    return grpc_cost(last.usage)


Face = Callable[..., Awaitable[Cost]]
FACES: list[Face] = [completion, chat, responses, messages, generate, grpc_chat]


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
async def test_sums_are_exact_whole_and_streamed(site: Site, face: Face) -> None:
    site.router.script = saying(ANSWER)
    cost = await face(site, stream=False)
    assert await face(site, stream=True) == cost
    for generation in site.router.generations:
        report = generation.report
        assert cost.prompt_tokens == report.num_prompt_tokens
        assert cost.cached_tokens == report.cached_tokens == 2
        assert cost.completion_tokens == report.num_completion_tokens == len(tokens_of(ANSWER)) + 1
        assert cost.total_tokens == cost.prompt_tokens + cost.completion_tokens
        assert cost.times == {
            "queue_time": report.queue_s + report.route_s,
            "prompt_time": report.prefill_wait_s + report.prefill_s + report.wire_s,
            "completion_time": report.completion_s,
            "total_time": cost.times["prompt_time"] + cost.times["completion_time"],
            "kv_transfer_time": report.kv_transfer_s,
        }
