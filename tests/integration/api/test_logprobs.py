"""Logprobs, echo and token ids over both faces: the right shape, and streamed equal to whole."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from relevo.v1 import inference_pb2

from router.request import FinishReason, TokenBatch
from tests.integration.api.conftest import ANSWER, Site, tokens_of
from tests.integration.api.scoring import scoring
from tests.tiny_tokenizer import EOS_TOKEN_ID

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "tiny", "prompt": "hi"}


async def whole(site: Site, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await site.inside.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(site: Site, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await site.http.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    lines = response.text.split("\n\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def joined(chunks: Sequence[dict[str, Any]], name: str) -> list[Any]:
    """One list out of the pieces of `choice.logprobs[name]`."""
    choices = [chunk["choices"][0] for chunk in chunks]
    return [each for choice in choices if choice["logprobs"] for each in choice["logprobs"][name]]


@pytest.mark.parametrize("size", [1, 3, 99])
async def test_a_chat_s_logprobs_are_the_same_streamed_and_whole(site: Site, size: int) -> None:
    site.router.script = scoring(ANSWER, size=size)
    body = {**CHAT, "logprobs": True, "top_logprobs": 2, "stop": ["no such"]}
    answer = await whole(site, "/v1/chat/completions", body)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    spelled = bytes(byte for each in content for byte in each["bytes"])
    assert spelled.decode() == ANSWER + "<|im_end|>"
    assert content[0].keys() == {"token", "logprob", "bytes", "top_logprobs"}
    assert content[0]["top_logprobs"][1] == {"token": "a", "logprob": -7.0, "bytes": [97]}
    chunks = await streamed(site, "/v1/chat/completions", body)
    assert joined(chunks, "content") == content


async def test_logprobs_come_with_the_chunk_that_shows_their_text(site: Site) -> None:
    """While a stop string may still come of it, neither text nor logprobs are out."""
    site.router.script = scoring("abxyc🦊d")
    body = {**CHAT, "logprobs": True, "stop": ["xyz"]}
    chunks = await streamed(site, "/v1/chat/completions", body)
    for chunk in chunks[:-2]:
        choice = chunk["choices"][0]
        if choice["logprobs"] is not None:
            told = bytes(byte for each in choice["logprobs"]["content"] for byte in each["bytes"])
            assert told.decode() == choice["delta"]["content"]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "abxyc🦊d"


@pytest.mark.parametrize("is_stop_shown", [False, True])
async def test_a_stop_string_cuts_the_text_and_keeps_the_logprobs(
    site: Site, is_stop_shown: bool
) -> None:
    site.router.script = scoring("abcdef")
    body = {**COMPLETION, "logprobs": 0, "stop": "cd", "include_stop_str_in_output": is_stop_shown}
    answer = await whole(site, "/v1/completions", body)
    choice = answer["choices"][0]
    assert choice["text"] == ("abcd" if is_stop_shown else "ab")
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"]
    assert max(choice["logprobs"]["text_offset"]) <= len(choice["text"])
    chunks = await streamed(site, "/v1/completions", body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        assert joined(chunks, name) == choice["logprobs"][name]


async def test_a_stop_token_shows_when_it_is_asked_for(site: Site) -> None:
    newline = tokens_of("\n")[0]
    site.router.script = lambda _: [TokenBatch([*tokens_of("ab"), newline], FinishReason.STOP)]
    body = {**COMPLETION, "stop_token_ids": [newline], "include_stop_str_in_output": True}
    assert (await whole(site, "/v1/completions", body))["choices"][0]["text"] == "ab\n"


async def test_a_completion_s_logprobs_have_places_in_the_text(site: Site) -> None:
    site.router.script = scoring("ab🦊c")
    answer = await whole(site, "/v1/completions", {**COMPLETION, "logprobs": 2})
    logprobs = answer["choices"][0]["logprobs"]
    text = answer["choices"][0]["text"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if "\ufffd" not in token and not token.startswith("<|"):
            assert text[offset:].startswith(token)
    # The chosen token is always there, beside the two likeliest.
    assert all(1 <= len(each) <= 3 for each in logprobs["top_logprobs"])
    pairs = zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
    assert all(token in candidates for token, candidates in pairs)


async def test_a19_a_logprob_of_minus_infinity_is_a_number_in_json(site: Site) -> None:
    site.router.script = scoring("ab")
    body = {**CHAT, "logprobs": True, "top_logprobs": 20}
    answer = await whole(site, "/v1/chat/completions", body)
    content = answer["choices"][0]["logprobs"]["content"]
    assert content[0]["top_logprobs"][2]["logprob"] == -9999.0


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"logprobs": True}, 200, None),
        ({"logprobs": True, "top_logprobs": 0}, 200, None),
        ({"logprobs": True, "top_logprobs": None}, 200, None),
        ({"logprobs": False, "top_logprobs": 0}, 200, None),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, 400, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ({"logprobs": 3}, 400, "logprobs"),
    ],
    ids=repr,
)
async def test_a20_logprobs_of_a_chat_with_and_without_candidates(
    site: Site, fields: dict[str, Any], status: int, param: str | None
) -> None:
    site.router.script = scoring("ab")
    response = await site.http.post("/v1/chat/completions", json={**CHAT, **fields})
    assert response.status_code == status
    if status == 400:
        assert response.json()["error"]["param"] == param
    elif fields["logprobs"]:
        content = response.json()["choices"][0]["logprobs"]["content"]
        assert [each["top_logprobs"] for each in content] == [[], [], []]
    else:
        assert response.json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("logprobs", [6, True, -1])
async def test_a_completion_takes_up_to_five_logprobs(site: Site, logprobs: object) -> None:
    response = await site.http.post("/v1/completions", json={**COMPLETION, "logprobs": logprobs})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")


NULLABLE = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "cache_salt",
    "stream",
    "stream_options",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "include_stop_str_in_output",
    "return_token_ids",
    "n",
    "user",
    "echo",
]


async def test_a21_null_is_absent(site: Site) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        plain = (await whole(site, path, body))["choices"]
        for nulls in [*([name] for name in NULLABLE), NULLABLE]:
            assert (await whole(site, path, {**body, **dict.fromkeys(nulls)}))["choices"] == plain


@pytest.mark.parametrize("prompt", ["héllo 🦊", tokens_of("héllo 🦊")], ids=["text", "ids"])
async def test_an_echo_puts_the_prompt_first(site: Site, prompt: object) -> None:
    site.router.script = scoring("ab")
    body = {"model": "tiny", "prompt": prompt, "echo": True}
    answer = await whole(site, "/v1/completions", body)
    assert answer["choices"][0]["text"] == "héllo 🦊ab"
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 3
    chunks = await streamed(site, "/v1/completions", body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "héllo 🦊ab"


async def test_an_echo_with_logprobs_scores_the_prompt_too(site: Site) -> None:
    site.router.script = scoring("ab")
    body = {"model": "tiny", "prompt": "héllo", "echo": True, "logprobs": 1, "stop": ["zz"]}
    choice = (await whole(site, "/v1/completions", body))["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert None not in logprobs["token_logprobs"][1:]
    num_prompt_tokens = len(tokens_of("héllo"))
    assert len(logprobs["tokens"]) == num_prompt_tokens + 3
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"][num_prompt_tokens] == len("héllo")
    chunks = await streamed(site, "/v1/completions", body)
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        assert joined(chunks, name) == logprobs[name]


async def test_a_prompt_s_logprobs_stand_beside_the_answer(site: Site) -> None:
    site.router.script = scoring("ab")
    prompt = tokens_of("héllo")
    body = {"model": "tiny", "prompt": prompt, "prompt_logprobs": 1}
    choice = (await whole(site, "/v1/completions", body))["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    assert [list(each)[-1] for each in choice["prompt_logprobs"][1:]] == [
        str(i) for i in prompt[1:]
    ]
    assert choice["prompt_logprobs"][1][str(prompt[1])]["rank"] == 1
    first = (await streamed(site, "/v1/completions", body))[0]["choices"][0]
    assert first["prompt_logprobs"] == choice["prompt_logprobs"]
    chat = await whole(site, "/v1/chat/completions", {**CHAT, "prompt_logprobs": 1})
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    chunks = await streamed(site, "/v1/chat/completions", {**CHAT, "prompt_logprobs": 1})
    told = [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk]
    assert told == [chat["prompt_logprobs"]]


async def test_a_prompt_of_one_token_has_its_null_in_a_stream_too(site: Site) -> None:
    """Its one entry is no news by itself: the first step may bring no text either."""
    site.router.script = scoring("🦊")
    body = {"model": "tiny", "prompt": tokens_of("a"), "prompt_logprobs": 1}
    choice = (await whole(site, "/v1/completions", body))["choices"][0]
    assert choice["prompt_logprobs"] == [None]
    chunks = [chunk["choices"][0] for chunk in await streamed(site, "/v1/completions", body)]
    told = [each["prompt_logprobs"] for each in chunks if "prompt_logprobs" in each]
    assert told == [[None]]


async def test_token_ids_on_demand(site: Site) -> None:
    body = {**COMPLETION, "return_token_ids": True}
    choice = (await whole(site, "/v1/completions", body))["choices"][0]
    assert choice["token_ids"] == [*tokens_of(ANSWER), EOS_TOKEN_ID]
    assert choice["prompt_token_ids"] == tokens_of("hi")
    chunks = await streamed(site, "/v1/completions", body)
    parts = [chunk["choices"][0].get("token_ids", []) for chunk in chunks]
    assert [token_id for part in parts for token_id in part] == choice["token_ids"]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == tokens_of("hi")
    chat = await whole(site, "/v1/chat/completions", {**CHAT, "return_token_ids": True})
    assert chat["choices"][0]["token_ids"] == choice["token_ids"]
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]


async def test_logprobs_over_grpc_streamed_and_whole(site: Site) -> None:
    site.router.script = scoring("abxyc🦊d")
    generation = inference_pb2.Generation(
        model="tiny", text="héllo", logprobs=1, prompt_logprobs=2, echo=True, stop=["xyz"]
    )
    answer = await site.stub.Generate(inference_pb2.GenerateRequest(generation=generation))
    prompt = tokens_of("héllo")
    assert answer.text == "hélloabxyc🦊d"
    assert [each.token_id for each in answer.logprobs] == [*prompt, *answer.token_ids]
    assert [each.token_id for each in answer.prompt_logprobs] == prompt[1:]
    assert all(len(each.top) == 2 for each in answer.prompt_logprobs)
    assert answer.logprobs[-2].text == "d"
    assert answer.logprobs[-2].logprob == -answer.logprobs[-2].token_id / 100
    request = inference_pb2.GenerateStreamRequest(generation=generation)
    messages = [message async for message in site.stub.GenerateStream(request)]
    assert [i for message in messages for i in message.logprobs] == list(answer.logprobs)
    assert list(messages[0].prompt_logprobs) == list(answer.prompt_logprobs)
    assert not any(message.prompt_logprobs for message in messages[1:])
