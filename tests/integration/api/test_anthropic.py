"""The official Anthropic client against the ingress."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx2
import pytest

from api.tokenizer import Tokenizer
from router.errors import GenerationFailed, NoWorkers, QueueFull
from router.request import FinishReason
from tests.integration.api.conftest import ANSWER, KEY, Site, saying, tokens_of
from tests.integration.api.test_tools import CALL, prompt_of, thinking_site, widen

__all__ = ["thinking_site"]

MESSAGES: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {"name": "Weather", "input_schema": {"type": "object", "properties": {"city": {}}}}
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "messages": MESSAGES}


def client_of(site: Site) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=f"http://127.0.0.1:{site.ingress.http_port}",
        api_key=KEY,
        max_retries=0,
        http_client=httpx2.AsyncClient(verify=False),
    )


@pytest.fixture
async def client(site: Site) -> AsyncIterator[anthropic.AsyncAnthropic]:
    widen(site)
    async with client_of(site) as opened:
        yield opened


async def test_a_message_is_answered(client: anthropic.AsyncAnthropic, site: Site) -> None:
    message = await client.messages.create(
        model="tiny",
        max_tokens=50,
        system=[{"type": "text", "text": "be kind"}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 5},
        metadata={"user_id": "me"},
    )
    assert message.content[0].type == "text"
    assert message.content[0].text == ANSWER
    assert (message.role, message.stop_reason, message.stop_sequence) == (
        "assistant",
        "end_turn",
        None,
    )
    usage, routed = message.usage, site.router.generations[0].request
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(routed.token_ids)
    assert usage.cache_read_input_tokens == 2
    assert usage.output_tokens == len(tokens_of(ANSWER)) + 1
    assert routed.sampling.max_tokens == 50
    assert (routed.sampling.temperature, routed.sampling.top_k) == (0.5, 5)
    assert message._request_id


async def test_models_are_listed(client: anthropic.AsyncAnthropic) -> None:
    models = [model async for model in client.models.list()]
    assert [(model.id, model.type, model.display_name) for model in models] == [
        ("tiny", "model", "tiny")
    ]
    assert models[0].created_at.tzinfo is not None
    assert await client.models.retrieve("tiny") == models[0]


async def test_a_stream_becomes_the_same_message(
    client: anthropic.AsyncAnthropic, site: Site
) -> None:
    site.router.script = saying(f"Look.\n{CALL}\n{CALL}")
    whole = await client.messages.create(**BODY, tools=[TOOL])
    async with client.messages.stream(**BODY, tools=[TOOL]) as stream:
        texts = [text async for text in stream.text_stream]
        streamed = await stream.get_final_message()
    assert "".join(texts) == "Look."

    def told(message: anthropic.types.Message) -> list[Any]:
        return [
            (block.type, block.text if block.type == "text" else (block.name, block.input))  # type: ignore[union-attr]
            for block in message.content
        ]

    assert told(streamed) == told(whole)
    assert told(whole) == [("text", "Look."), *[("tool_use", ("Weather", {"city": "Oslo"}))] * 2]
    assert streamed.stop_reason == whole.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert streamed.usage.input_tokens == whole.usage.input_tokens


async def test_events_come_in_order_and_blocks_do_not_overlap(site: Site) -> None:
    widen(site)
    site.router.script = saying(f"Look.\n{CALL}")
    response = await site.http.post("/v1/messages", json={**BODY, "tools": [TOOL], "stream": True})
    blocks = [block.split("\n") for block in response.text.split("\n\n")[:-1]]
    names = [name.removeprefix("event: ") for name, _ in blocks]
    data = [json.loads(line.removeprefix("data: ")) for _, line in blocks]
    assert [each["type"] for each in data] == names
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    starts = [n for n in names if n in {"content_block_start", "content_block_stop"}]
    assert starts == ["content_block_start", "content_block_stop"] * 2
    assert data[0]["message"]["usage"]["output_tokens"] >= 0
    assert data[-2]["usage"]["total_time"] == pytest.approx(
        data[-2]["usage"]["prompt_time"] + data[-2]["usage"]["completion_time"], abs=1e-9
    )


async def test_tools_go_to_and_fro(
    client: anthropic.AsyncAnthropic, site: Site, tokenizer: Tokenizer
) -> None:
    chat: Any = [
        *MESSAGES,
        {"role": "user", "content": "there"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "toolu_1", "name": "Weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    site.router.script = saying('[{"name": "Weather", "arguments": {}}]')
    message = await client.messages.create(
        model="tiny",
        max_tokens=50,
        messages=chat,
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "Weather"},
    )
    assert message.content[0].type == "tool_use"
    assert message.stop_reason == "tool_use"
    prompt = prompt_of(site, tokenizer)
    assert "hi\nthere" in prompt
    assert "<tool_response>\nrain\n</tool_response>" in prompt
    assert site.router.generations[0].request.sampling.HasField("grammar")


async def test_thoughts_come_only_when_asked_for(thinking_site: Site) -> None:
    site = thinking_site
    async with client_of(site) as client:
        site.router.script = saying("Let me see.\n</think>\n\nRain.")
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        for answer in (
            await client.messages.create(**BODY, thinking=thinking),
            await _streamed(client, thinking=thinking),
        ):
            assert [block.type for block in answer.content] == ["thinking", "text"]
            assert answer.content[0].thinking == "Let me see."  # type: ignore[union-attr]
        site.router.script = saying("Rain.")
        answer = await client.messages.create(**BODY)
        assert [block.type for block in answer.content] == ["text"]


async def _streamed(client: anthropic.AsyncAnthropic, **extra: Any) -> anthropic.types.Message:
    async with client.messages.stream(**BODY, **extra) as stream:
        return await stream.get_final_message()


async def test_why_it_stopped(client: anthropic.AsyncAnthropic, site: Site) -> None:
    site.router.script = saying("one two three", end=FinishReason.LENGTH)
    cut = await client.messages.create(**BODY)
    assert cut.stop_reason == "max_tokens"
    stopped = await client.messages.create(**BODY, stop_sequences=["two", "x"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "two")


async def test_tokens_are_counted_as_they_are_used(
    client: anthropic.AsyncAnthropic, site: Site
) -> None:
    await client.messages.create(**BODY, system="be kind", tools=[TOOL])
    count = await client.messages.count_tokens(
        model="tiny", messages=MESSAGES, system="be kind", tools=[TOOL]
    )
    assert count.input_tokens == len(site.router.generations[0].request.token_ids)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": 1.5}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "only text"),
    ({"messages": [*MESSAGES, {"role": "assistant", "content": "I"}]}, "last message"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "f", "input_schema": 5}]}, "tools[0]"),
    ({"tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "budget_tokens"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"output_config": {"effort": "enormous"}}, "output_config.effort"),
    ({"mcp_servers": [{"url": "http://127.0.0.1"}]}, "mcp_servers"),
]


@pytest.mark.parametrize(("fields", "word"), BAD, ids=lambda each: repr(each)[:50])
async def test_what_is_wrong_is_a_400_in_their_shape(
    client: anthropic.AsyncAnthropic, site: Site, fields: dict[str, Any], word: str
) -> None:
    for stream in (False, True):
        response = await site.http.post("/v1/messages", json={**BODY, **fields, "stream": stream})
        assert response.status_code == 400
        body = response.json()
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert word in body["error"]["message"]
        assert response.headers["request-id"] == body["request_id"]
    assert site.router.generations == []


@pytest.mark.parametrize(
    ("error", "expected", "kind"),
    [
        (QueueFull("full", 3.2), anthropic.RateLimitError, "rate_limit_error"),
        (NoWorkers("none", 2.0), anthropic.InternalServerError, "overloaded_error"),
        (GenerationFailed("/secret"), anthropic.InternalServerError, "api_error"),
    ],
)
async def test_failures_have_their_types(
    client: anthropic.AsyncAnthropic,
    site: Site,
    error: Exception,
    expected: type[anthropic.APIStatusError],
    kind: str,
) -> None:
    site.router.script = lambda _: [error]
    with pytest.raises(expected) as caught:
        await client.messages.create(**BODY)
    assert caught.value.body["error"]["type"] == kind  # type: ignore[index,call-overload]
    site.router.script = lambda request: [*saying("ab", end=None)(request), error]
    with pytest.raises(anthropic.APIStatusError) as inside:
        await _streamed(client)
    assert inside.value.body["error"]["type"] == kind  # type: ignore[index,call-overload]
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(**{**BODY, "model": "nope"})


async def test_keys_are_taken_as_their_client_sends_them(locked_site: Site) -> None:
    async with client_of(locked_site) as client:
        assert (await client.messages.create(**BODY)).content
    for headers in ({}, {"x-api-key": "sk-wrong"}):
        response = await locked_site.http.post("/v1/messages", json=BODY, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
    elsewhere = await locked_site.http.get("/v1/models", headers={"x-api-key": KEY})
    assert elsewhere.status_code == 401


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_unknown_fields_are_named(site: Site, path: str) -> None:
    response = await site.http.post(path, json={**BODY, "bootstrap_host": "x"})
    assert "bootstrap_host" in response.headers["x-relevo-warnings"]
