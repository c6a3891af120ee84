"""The Responses API through the official client, its stream helper too."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from api.tokenizer import Tokenizer
from router.errors import GenerationFailed, QueueFull
from router.request import FinishReason
from tests.integration.api.conftest import ANSWER, Site, saying, tokens_of
from tests.integration.api.test_tools import CALL, prompt_of, thinking_site, wide_site

__all__ = ["thinking_site", "wide_site"]

TOOL: Any = {
    "type": "function",
    "name": "Weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


async def test_a_response_is_answered(wide_site: Site) -> None:
    site = wide_site
    response = await site.openai.responses.create(
        model="tiny",
        instructions="be kind",
        input="hi",
        max_output_tokens=50,
        temperature=0.5,
        metadata={"a": "b"},
        store=False,
    )
    assert (response.output_text, response.status) == (ANSWER, "completed")
    assert (response.instructions, response.temperature) == ("be kind", 0.5)
    assert response.store is False
    assert response.metadata == {"a": "b"}
    assert response.usage is not None
    assert response.usage.output_tokens == len(tokens_of(ANSWER)) + 1
    assert response.usage.input_tokens_details.cached_tokens == 2
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert site.router.generations[0].request.sampling.max_tokens == 50


def told(response: Response) -> list[Any]:
    items: list[Any] = []
    for item in response.output:
        if item.type == "message":
            items.append([part.text for part in item.content if part.type == "output_text"])
        elif item.type == "function_call":
            items.append((item.name, json.loads(item.arguments)))
        elif item.type == "reasoning":
            items.append({part.text for part in item.content or []})
    return items


async def test_a_stream_becomes_the_same_response(wide_site: Site) -> None:
    site = wide_site
    site.router.script = saying(f"Look.\n{CALL}\n{CALL}")
    body: Any = {"model": "tiny", "input": "hi", "tools": [TOOL]}
    whole = await site.openai.responses.create(**body)
    async with site.openai.responses.stream(**body) as stream:
        events = [event async for event in stream]
        streamed = await stream.get_final_response()
    assert told(streamed) == told(whole)
    assert told(whole) == [["Look."], *[("Weather", {"city": "Oslo"})] * 2]
    assert [event.sequence_number for event in events] == sorted(
        event.sequence_number for event in events
    )
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-2:] == ["response.output_item.done", "response.completed"]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")
    assert streamed.usage == whole.usage


async def test_a_conversation_with_calls_is_one_chat(wide_site: Site, tokenizer: Tokenizer) -> None:
    site = wide_site
    items: Any = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "input_text", "text": "How is it?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
        {"type": "function_call", "call_id": "c1", "name": "Weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "Weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": "snow"},
    ]
    site.router.script = saying('[{"name": "Weather", "arguments": {"city": "Oslo"}}]')
    response = await site.openai.responses.create(
        model="tiny",
        instructions="be brief",
        input=items,
        tools=[TOOL],
        tool_choice={"type": "function", "name": "Weather"},
    )
    assert told(response) == [("Weather", {"city": "Oslo"})]
    prompt = prompt_of(site, tokenizer)
    assert prompt.count("<|im_start|>assistant") == 2
    assert prompt.startswith("<|im_start|>system\nbe brief\n\nbe kind\n\nYou may call")
    assert "rain\n</tool_response>\n<tool_response>\nsnow" in prompt
    assert site.router.generations[0].request.sampling.HasField("grammar")


async def test_what_the_client_makes_of_a_model_is_understood(wide_site: Site) -> None:
    class City(BaseModel):
        name: str

    wide_site.router.script = saying('{"name": "Oslo"}')
    response = await wide_site.openai.responses.parse(model="tiny", input="hi", text_format=City)
    assert response.output_parsed == City(name="Oslo")
    assert wide_site.router.generations[0].request.sampling.HasField("grammar")


async def test_thoughts_are_an_item(thinking_site: Site) -> None:
    thinking_site.router.script = saying("Let me see.\n</think>\n\nRain.")
    body: Any = {"model": "tiny", "input": "hi", "reasoning": {"effort": "low"}}
    whole = await thinking_site.openai.responses.create(**body)
    assert told(whole) == [{"Let me see."}, ["Rain."]]
    async with thinking_site.openai.responses.stream(**body) as stream:
        assert told(await stream.get_final_response()) == told(whole)
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens > 0


async def test_a_cut_answer_is_incomplete(wide_site: Site) -> None:
    wide_site.router.script = saying("abc", end=FinishReason.LENGTH)
    for stream in (False, True):
        body = {"model": "tiny", "input": "hi", "stream": stream}
        text = (await wide_site.http.post("/v1/responses", json=body)).text
        last = json.loads(text.strip().rsplit("data: ")[-1])
        response = last.get("response", last)
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["x_relevo"]["decode_worker"] == "decode-0"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
    (
        {"input": [{"role": {}, "content": "x"}, {"role": "system", "content": "y"}]},
        "input[0].role",
    ),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].type",
    ),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "function", "name": []}}, "tool_choice.name"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda each: repr(each)[:50])
async def test_what_is_wrong_is_named_in_its_words(
    wide_site: Site, fields: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        body = {"model": "tiny", "input": "hi", **fields, "stream": stream}
        response = await wide_site.http.post("/v1/responses", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert wide_site.router.generations == []


async def test_failures_before_and_inside_a_stream(wide_site: Site) -> None:
    site = wide_site
    site.router.script = lambda _: [QueueFull("full", 2.0)]
    with pytest.raises(openai.RateLimitError):
        await site.openai.responses.create(model="tiny", input="hi", stream=True)
    site.router.script = lambda request: [
        *saying("ab", end=None)(request),
        GenerationFailed("/secret"),
    ]
    stream = await site.openai.responses.create(model="tiny", input="hi", stream=True)
    events = [event async for event in stream]
    assert events[-1].type == "error"
    assert events[-1].code == "internal_error"
    assert "secret" not in events[-1].message
