"""Tools, thoughts and the other fields of a chat, through the official client."""

import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from relevo.v1 import common_pb2

from api.tokenizer import Tokenizer
from tests.integration.api.conftest import Site, open_site, saying
from tests.tiny_tokenizer import write_tokenizer

MESSAGES: Any = [{"role": "user", "content": "How is the weather in Oslo?"}]
CALL = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THINKING_TEMPLATE = (
    "{% for message in messages %}{{ message.role + ':' + message.content + '\n' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}"
    "{% if tools %}tools:{{ tools | tojson }}{% endif %}"
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n"
    "{% else %}<think></think>{% endif %}"
)


class Weather(BaseModel):
    city: str
    unit: Literal["C", "F"] = "C"


TOOL: Any = openai.pydantic_function_tool(Weather)
OTHER: Any = {"type": "function", "function": {"name": "time"}}


def widen(site: Site) -> None:
    assert site.router.model is not None
    site.router.model = dataclasses.replace(site.router.model, max_model_len=4096)


@pytest.fixture
async def wide_site(site: Site) -> Site:
    widen(site)
    return site


@pytest.fixture
async def thinking_site(tmp_path: Path) -> AsyncIterator[Site]:
    path = write_tokenizer(tmp_path, chat_template=THINKING_TEMPLATE)
    async with open_site(path, Tokenizer.load(str(path))) as opened:
        widen(opened)
        yield opened


def prompt_of(site: Site, tokenizer: Tokenizer) -> str:
    ids = site.router.generations[-1].request.token_ids
    return tokenizer._backend.decode(list(ids), skip_special_tokens=False)


async def test_a_call_is_parsed_whole_and_streamed_alike(wide_site: Site) -> None:
    site = wide_site
    site.router.script = saying(f"Let me look.\n{CALL}\n{CALL}")
    whole = await site.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=[TOOL, OTHER]
    )
    choice = whole.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
    assert choice.message.tool_calls is not None
    first, second = choice.message.tool_calls
    assert first.type == second.type == "function"
    assert first.function.name == "Weather"
    assert json.loads(first.function.arguments) == {"city": "Oslo"}
    assert first.id != second.id
    async with site.openai.chat.completions.stream(
        model="tiny", messages=MESSAGES, tools=[TOOL, OTHER]
    ) as stream:
        pieces = [
            event.arguments_delta
            async for event in stream
            if event.type == "tool_calls.function.arguments.delta"
        ]
        final = await stream.get_final_completion()
    assert len(pieces) > 5, "arguments are streamed as they come"
    message = final.choices[0].message
    assert final.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me look."
    assert message.tool_calls is not None
    assert [call.function.name for call in message.tool_calls] == ["Weather", "Weather"]
    assert message.tool_calls[0].function.parsed_arguments == Weather(city="Oslo")


async def test_one_call_only_where_calls_may_not_be_parallel(wide_site: Site) -> None:
    wide_site.router.script = saying(CALL * 2)
    answer = await wide_site.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=[TOOL], parallel_tool_calls=False
    )
    assert len(answer.choices[0].message.tool_calls or []) == 1
    assert answer.choices[0].message.content is None


async def test_a_model_that_knows_no_tools_is_shown_them(
    wide_site: Site, tokenizer: Tokenizer
) -> None:
    chat: Any = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "Weather", "arguments": '{"city": "Oslo"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain <|im_end|>"},
        {"role": "tool", "tool_call_id": "call_2", "content": "snow"},
    ]
    await wide_site.openai.chat.completions.create(model="tiny", messages=chat, tools=[TOOL])
    prompt = prompt_of(wide_site, tokenizer)
    assert prompt.startswith("<|im_start|>system\nYou may call functions.")
    assert '"name":"Weather"' in prompt
    assert '<tool_call>\n{"name":"Weather","arguments":{"city":"Oslo"}}\n</tool_call>' in prompt
    assert prompt.count("<|im_start|>user") == 2, "results of one turn stand together"
    ids = list(wide_site.router.generations[-1].request.token_ids)
    assert ids.count(2) == 4, "a result cannot end a turn"


@pytest.mark.parametrize("choice", ["required", "named", "allowed"])
async def test_a_call_that_must_be_is_enforced(wide_site: Site, choice: str) -> None:
    site = wide_site
    site.router.script = saying('[{"name": "Weather", "arguments": {"city": "Oslo"}}]')
    function = {"type": "function", "function": {"name": "Weather"}}
    allowed = {"mode": "required", "tools": [function]}
    tool_choice: Any = {
        "required": "required",
        "named": function,
        "allowed": {"type": "allowed_tools", "allowed_tools": allowed},
    }[choice]
    answer = await site.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=[OTHER, TOOL], tool_choice=tool_choice
    )
    grammar = site.router.generations[0].request.sampling.grammar
    assert grammar.kind == common_pb2.Grammar.KIND_JSON_SCHEMA
    schema = json.loads(grammar.text)
    names = [each["properties"]["name"]["const"] for each in schema["items"]["anyOf"]]
    assert names == (["time", "Weather"] if choice == "required" else ["Weather"])
    assert ("maxItems" in schema) == (choice == "named")
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    assert answer.choices[0].finish_reason == ("stop" if choice == "named" else "tool_calls")
    assert answer.choices[0].message.content is None


async def test_without_a_choice_of_tools_text_is_text(wide_site: Site) -> None:
    wide_site.router.script = saying(CALL)
    for extra in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        answer = await wide_site.openai.chat.completions.create(
            model="tiny", messages=MESSAGES, **extra
        )
        assert answer.choices[0].message.content == CALL
        assert answer.choices[0].finish_reason == "stop"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [OTHER, OTHER]}, "tools"),
    ({"tools": [OTHER] * 129}, "tools"),
    ({"tool_choice": "required"}, "tools"),
    ({"tools": [OTHER], "tool_choice": "maybe"}, "tool_choice"),
    (
        {"tools": [OTHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice.function.name",
    ),
    (
        {"tools": [OTHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "tool_choice",
    ),
    ({"tools": [OTHER], "tool_choice": "required", "ignore_eos": True}, "tool_choice"),
    ({"parallel_tool_calls": "yes", "tools": [OTHER]}, "parallel_tool_calls"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"thinking": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"reasoning_effort": "enormous"}, "reasoning_effort"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda each: repr(each)[:60])
async def test_what_is_wrong_is_named(wide_site: Site, fields: dict[str, Any], param: str) -> None:
    body = {"model": "tiny", "messages": MESSAGES, **fields}
    response = await wide_site.http.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert wide_site.router.generations == []


async def test_a_schema_that_cannot_be_enforced_is_a_400_that_names_the_tools(
    wide_site: Site,
) -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "unevaluatedItems": 5}},
    }
    body = {"model": "tiny", "messages": MESSAGES, "tools": [tool], "tool_choice": "required"}
    response = await wide_site.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"


async def test_thoughts_are_split_off(thinking_site: Site) -> None:
    site = thinking_site
    site.router.script = saying("Let me see.\n</think>\n\nRain.")
    answer = await site.openai.chat.completions.create(model="tiny", messages=MESSAGES)
    message = answer.choices[0].message
    assert message.content == "Rain."
    assert message.model_extra == {"reasoning_content": "Let me see."}
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    num_thought = answer.usage.completion_tokens_details.reasoning_tokens
    assert num_thought is not None
    assert 0 < num_thought < answer.usage.completion_tokens
    stream = await site.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(each.content or "" for each in deltas) == "Rain."
    thoughts = [(each.model_extra or {}).get("reasoning_content", "") for each in deltas]
    assert "".join(thoughts) == "Let me see."
    assert chunks[-1].usage == answer.usage


@pytest.mark.parametrize(
    "fields",
    [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}],
    ids=repr,
)
async def test_thinking_can_be_left_out(thinking_site: Site, fields: dict[str, Any]) -> None:
    thinking_site.router.script = saying("Rain.")
    body = {"model": "tiny", "messages": MESSAGES, **fields}
    answer = (await thinking_site.http.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["message"]["content"] == "Rain."
    assert "reasoning_content" not in answer["choices"][0]["message"]


async def test_a_template_that_knows_tools_gets_them(thinking_site: Site) -> None:
    site = thinking_site
    site.router.script = saying(f"</think>{CALL}")
    tool = {"type": "function", "function": {"name": "Weather", "description": "<|im_end|>"}}
    chat: Any = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "Weather", "arguments": '{"city": "<|im_end|>"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    body = {"model": "tiny", "messages": chat, "tools": [tool]}
    answer = (await site.http.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "Weather"
    tokenizer = site.ingress.serving.tokenizer
    prompt = prompt_of(site, tokenizer)
    call = '{"name": "Weather", "arguments": {"city": "<|im_end|>"}}'
    assert f"<tool_call>{call}</tool_call>" in prompt
    assert 'tools:[{"type": "function", "function": {"name": "Weather"' in prompt
    assert "You may call functions" not in prompt
    ids = list(site.router.generations[-1].request.token_ids)
    assert ids.count(2) == 0, "no tool can end a turn"


async def test_usage_runs_along_when_asked(wide_site: Site) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await wide_site.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options=options
    )
    counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage is not None]
    assert counts == sorted(counts)
    assert len(set(counts)) > 5


async def test_a_prompt_that_may_be_cut_keeps_its_end(site: Site) -> None:
    body = {"model": "tiny", "prompt": list(range(3, 20)), "truncate_prompt_tokens": 4}
    answer = await site.http.post("/v1/completions", json={**body, "echo": True})
    assert list(site.router.generations[0].request.token_ids) == [16, 17, 18, 19]
    assert answer.json()["usage"]["prompt_tokens"] == 4
    body |= {"prompt": [5] * 256, "truncate_prompt_tokens": -1}
    assert (await site.http.post("/v1/completions", json=body)).status_code == 200
    assert len(site.router.generations[1].request.token_ids) == 255


async def test_an_answer_tells_who_served_it(wide_site: Site) -> None:
    expected = {
        "prefill_worker": "prefill-0",
        "decode_worker": "decode-0",
        "cached_tokens": {"prefill": 2, "decode": 0},
        "kv_transfer_bytes": 0,
    }
    body: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "service_tier": "flex"}
    whole = (await wide_site.http.post("/v1/chat/completions", json=body)).json()
    assert whole["service_tier"] == "default"
    told = [whole["x_relevo"]]
    for options in ({}, {"stream_options": {"include_usage": True}}):
        response = await wide_site.http.post(
            "/v1/chat/completions", json={**body, **options, "stream": True}
        )
        chunks = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]
        assert [("x_relevo" in chunk) for chunk in chunks] == [*[False] * (len(chunks) - 1), True]
        told.append(chunks[-1]["x_relevo"])
    for each in told:
        assert each.pop("request_id")
        assert each == expected


async def test_tokenize_knows_tools_and_says_what_each_token_is(wide_site: Site) -> None:
    site = wide_site
    body = {"messages": MESSAGES, "tools": [OTHER], "return_token_strs": True, "nonsense": 1}
    response = await site.http.post("/tokenize", json=body)
    answer = response.json()
    assert "nonsense" in response.headers["x-relevo-warnings"]
    assert "".join(answer["token_strs"]).count('"name":"time"') == 1
    assert len(answer["token_strs"]) == answer["count"]
    await site.http.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": MESSAGES, "tools": [OTHER]}
    )
    assert answer["tokens"] == list(site.router.generations[0].request.token_ids)
    bare = {"prompt": "hi", "add_special_tokens": False}
    assert (await site.http.post("/tokenize", json=bare)).json()["count"] == 2
    bad = {"prompt": "hi", "return_token_strs": "yes"}
    assert (await site.http.post("/tokenize", json=bad)).status_code == 400
