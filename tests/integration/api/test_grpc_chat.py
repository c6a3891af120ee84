"""Chats over gRPC: the same answers and the same verdicts as over HTTP."""

import json
from typing import Any

import grpc
import grpc.aio
import pytest
from relevo.v1 import common_pb2, inference_pb2

from tests.integration.api.conftest import ANSWER, Site, saying
from tests.integration.api.test_grpc import details_of
from tests.integration.api.test_tools import CALL, thinking_site, wide_site

__all__ = ["thinking_site", "wide_site"]

HI = inference_pb2.ChatMessage(role="user", content="hi")
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = inference_pb2.Tool(name="Weather", parameters=json.dumps(PARAMETERS))


def chat_of(generation: dict[str, Any] | None = None, **fields: Any) -> inference_pb2.Chat:
    fields = {"messages": [HI], **fields}
    return inference_pb2.Chat(
        generation=inference_pb2.Generation(**{"model": "tiny", **(generation or {})}), **fields
    )


async def answered(site: Site, chat: inference_pb2.Chat) -> inference_pb2.ChatResponse:
    return await site.stub.Chat(inference_pb2.ChatRequest(chat=chat))


async def streamed(site: Site, chat: inference_pb2.Chat) -> list[inference_pb2.ChatStreamResponse]:
    request = inference_pb2.ChatStreamRequest(chat=chat)
    return [message async for message in site.stub.ChatStream(request)]


async def test_a_chat_is_answered_whole_and_streamed_alike(wide_site: Site) -> None:
    site = wide_site
    site.router.script = saying(f"Look.\n{CALL}\n{CALL}")
    chat = chat_of(tools=[WEATHER])
    whole = await answered(site, chat)
    messages = await streamed(site, chat)
    (choice,) = whole.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Look.")
    assert [call.name for call in choice.message.tool_calls] == ["Weather", "Weather"]
    assert json.loads(choice.message.tool_calls[1].arguments) == {"city": "Oslo"}
    assert choice.finish_reason == common_pb2.FINISH_REASON_TOOL_CALLS
    assert "".join(message.content for message in messages) == choice.message.content
    calls: dict[int, str] = {}
    for piece in (call for message in messages for call in message.tool_calls):
        calls[piece.index] = calls.get(piece.index, "") + piece.arguments
    assert list(calls.values()) == [call.arguments for call in choice.message.tool_calls]
    assert [i for message in messages for i in message.token_ids] == list(choice.token_ids)
    assert messages[-1].finish_reason == choice.finish_reason
    assert (messages[-1].usage, messages[-1].served_by) == (whole.usage, whole.served_by)
    assert whole.served_by.decode_worker == "decode-0"
    assert not any(message.HasField("usage") for message in messages[:-1])


async def test_a_plain_chat_gets_the_prompt_it_gets_over_http(wide_site: Site) -> None:
    site = wide_site
    assert (await answered(site, chat_of())).choices[0].message.content == ANSWER
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    await site.http.post("/v1/chat/completions", json=body)
    first, second = (each.request for each in site.router.generations)
    assert first.token_ids == second.token_ids
    assert first.sampling.max_tokens == second.sampling.max_tokens
    ids = await site.stub.Tokenize(inference_pb2.TokenizeRequest(chat=chat_of()))
    assert list(ids.token_ids) == first.token_ids


async def test_a_named_call_is_enforced(wide_site: Site) -> None:
    wide_site.router.script = saying('[{"name": "Weather", "arguments": {"city": "Oslo"}}]')
    choice = inference_pb2.ToolChoice(function="Weather")
    answer = (await answered(wide_site, chat_of(tools=[WEATHER], tool_choice=choice))).choices[0]
    assert wide_site.router.generations[0].request.sampling.HasField("grammar")
    assert answer.message.tool_calls[0].name == "Weather"
    assert answer.finish_reason == common_pb2.FINISH_REASON_STOP


async def test_thoughts_are_apart(thinking_site: Site) -> None:
    thinking_site.router.script = saying("Let me see.\n</think>\n\nRain.")
    whole = await answered(thinking_site, chat_of())
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("Let me see.", "Rain.")
    assert 0 < whole.usage.reasoning_tokens < whole.usage.completion_tokens
    thinking_site.router.script = saying("Rain.")
    quiet = (await answered(thinking_site, chat_of(enable_thinking=False))).choices[0].message
    assert (quiet.reasoning_content, quiet.content) == ("", "Rain.")


MESSAGES = [{"role": "user", "content": "hi"}]
# The same over gRPC and over HTTP.
SAME: list[tuple[inference_pb2.Chat, dict[str, Any]]] = [
    (chat_of(messages=[]), {"messages": []}),
    (
        chat_of(messages=[inference_pb2.ChatMessage(role="wizard", content="x")]),
        {"messages": [{"role": "wizard", "content": "x"}]},
    ),
    (
        chat_of(messages=[inference_pb2.ChatMessage(role="tool", content="x")]),
        {"messages": [{"role": "tool", "content": "x"}]},
    ),
    (chat_of({"temperature": 3.0}), {"temperature": 3.0}),
    (chat_of({"max_tokens": 0}), {"max_tokens": 0}),
    (chat_of({"max_tokens": 10_000}), {"max_tokens": 10_000}),
    (chat_of({"best_of": 2}), {"best_of": 2}),
    (chat_of({"echo": True}), {"echo": True}),
    (chat_of({"truncate_prompt_tokens": 0}), {"truncate_prompt_tokens": 0}),
    (chat_of({"model": "nope"}), {"model": "nope"}),
    (
        chat_of(tools=[inference_pb2.Tool(name="a b")]),
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    ),
    (
        chat_of(tool_choice=inference_pb2.ToolChoice(mode="required")),
        {"tool_choice": "required"},
    ),
    (chat_of(tool_choice=inference_pb2.ToolChoice(mode="maybe")), {"tool_choice": "maybe"}),
    (chat_of(reasoning_effort="enormous"), {"reasoning_effort": "enormous"}),
    (chat_of({"stop": [""]}), {"stop": [""]}),
]


@pytest.mark.parametrize(("chat", "fields"), SAME, ids=lambda each: repr(each)[:40])
async def test_both_faces_judge_alike(
    wide_site: Site, chat: inference_pb2.Chat, fields: dict[str, Any]
) -> None:
    body = {"model": "tiny", "messages": MESSAGES, **fields}
    response = await wide_site.http.post("/v1/chat/completions", json=body)
    expected = {400: grpc.StatusCode.INVALID_ARGUMENT, 404: grpc.StatusCode.NOT_FOUND}
    error = response.json()["error"]
    for call in (answered, streamed):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(wide_site, chat)
        assert caught.value.code() is expected[response.status_code]
        violation = details_of(caught.value)["BadRequest"].field_violations[0]  # type: ignore[attr-defined]
        assert (violation.field, violation.description) == (error["param"], error["message"])
    assert wide_site.router.generations == []


@pytest.mark.parametrize("parameters", ["{", "[" * 5000, "5"])
async def test_a_tool_s_schema_must_be_json(wide_site: Site, parameters: str) -> None:
    tool = inference_pb2.Tool(name="f", parameters=parameters)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answered(wide_site, chat_of(tools=[tool]))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "tools[0].function.parameters" in (caught.value.details() or "")


async def test_a_chat_has_no_prompt(wide_site: Site) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answered(wide_site, chat_of({"text": "hi"}))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
