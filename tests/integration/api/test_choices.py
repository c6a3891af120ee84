"""Several choices of one prompt over both faces: indexes, ends, usage, ranking, verdicts."""

import json
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from relevo.v1 import common_pb2, inference_pb2

from router.logprobs import TokenLogprobs
from router.request import FinishReason, RoutedRequest, TokenBatch
from tests.fake_router import Step
from tests.integration.api.conftest import Site, tokens_of
from tests.tiny_tokenizer import EOS_TOKEN_ID

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "tiny", "prompt": "hi"}
TEXTS = ("first", "second one", "3rd")
CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"


def text_of(request: RoutedRequest, index: int) -> str:
    """What a choice says: it depends on its prompt, too."""
    return f"{TEXTS[index % 3]} {len(request.token_ids)}"


def interleaved(request: RoutedRequest) -> Sequence[Step]:
    """The choices in turns, a token each; likelier the longer their text."""
    texts = [tokens_of(text_of(request, index)) for index in range(request.num_choices)]
    steps: list[Step] = []
    for position in range(max(map(len, texts)) + 1):
        for index, token_ids in enumerate(texts):
            if position < len(token_ids):
                batch = TokenBatch([token_ids[position]], choice_index=index)
            elif position == len(token_ids):
                batch = TokenBatch([EOS_TOKEN_ID], FinishReason.STOP, choice_index=index)
            else:
                continue
            if request.sampling.HasField("num_logprobs"):
                logprob = -1.0 / len(token_ids)
                batch.logprobs.append(TokenLogprobs(logprob, 1, ()))
            steps.append(batch)
    return steps


@pytest.fixture(autouse=True)
def several(site: Site) -> None:
    site.router.script = interleaved


async def post(site: Site, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    response = await site.http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


async def stream(site: Site, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = await site.http.post(path, json={**body, **options})
    assert response.status_code == 200, response.text
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line[6:]) for line in lines[:-2]]


@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), (COMPLETION_PATH, COMPLETION)])
async def test_a_stream_of_choices_says_the_same_as_the_whole(
    site: Site, path: str, body: dict[str, Any]
) -> None:
    body = {**body, "n": 3}
    whole = await post(site, path, body)
    [request] = [generation.request for generation in site.router.generations]
    assert request.num_choices == 3
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    texts = [choice.get("text") or choice["message"]["content"] for choice in whole["choices"]]
    assert texts == [text_of(request, index) for index in range(3)]
    *chunks, last = await stream(site, path, body)
    streamed = ["", "", ""]
    ends: list[int] = []
    for chunk in chunks:
        [choice] = chunk["choices"]
        assert choice["index"] not in ends, "a choice goes on after its end"
        streamed[choice["index"]] += (
            choice.get("text") or choice.get("delta", {}).get("content") or ""
        )
        if choice["finish_reason"] is not None:
            ends.append(choice["index"])
    assert streamed == texts
    assert sorted(ends) == [0, 1, 2]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    usage = whole["usage"]
    assert usage["prompt_tokens"] == len(request.token_ids)
    assert usage["completion_tokens"] == sum(len(tokens_of(text)) + 1 for text in texts)


async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(site: Site) -> None:
    prompts = [[5], [5, 6], [5, 6, 7]]
    body = {**COMPLETION, "prompt": prompts, "n": 2}
    whole = await post(site, COMPLETION_PATH, body)
    texts = [choice["text"] for choice in whole["choices"]]
    assert texts == [f"{TEXTS[index]} {len(p)}" for p in prompts for index in range(2)]
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert whole["usage"]["prompt_tokens"] == 6  # each prompt once
    *chunks, last = await stream(site, COMPLETION_PATH, body)
    streamed = [""] * 6
    for chunk in chunks:
        [choice] = chunk["choices"]
        streamed[choice["index"]] += choice["text"]
    assert streamed == texts
    assert last["usage"] == whole["usage"]


async def test_a_stop_string_ends_one_choice_and_no_other(site: Site) -> None:
    whole = await post(site, CHAT_PATH, {**CHAT, "n": 3, "stop": "co"})
    [generation] = site.router.generations
    contents = [choice["message"]["content"] for choice in whole["choices"]]
    expected = [text_of(generation.request, index) for index in range(3)]
    assert contents == [expected[0], "se", expected[2]]
    assert generation.ended_choices == [1]


async def test_the_best_are_shown_and_all_are_counted(site: Site) -> None:
    whole = await post(site, COMPLETION_PATH, {**COMPLETION, "n": 2, "best_of": 3})
    [request] = [generation.request for generation in site.router.generations]
    assert request.num_choices == 3
    texts = [text_of(request, index) for index in range(3)]
    ranked = sorted(texts, key=lambda text: len(tokens_of(text)), reverse=True)
    assert [choice["text"] for choice in whole["choices"]] == ranked[:2]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in whole["choices"])
    total = sum(len(tokens_of(text)) + 1 for text in texts)
    assert whole["usage"]["completion_tokens"] == total


def generation(**fields: Any) -> inference_pb2.Generation:
    return inference_pb2.Generation(model="tiny", text="hi", **fields)


async def test_grpc_gives_the_same_choices(site: Site) -> None:
    whole = await post(site, COMPLETION_PATH, {**COMPLETION, "n": 3})
    texts = [choice["text"] for choice in whole["choices"]]
    answer = await site.stub.Generate(inference_pb2.GenerateRequest(generation=generation(n=3)))
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert (answer.text, list(answer.token_ids)) == (texts[0], list(answer.choices[0].token_ids))
    assert answer.usage.completion_tokens == whole["usage"]["completion_tokens"]
    best = await site.stub.Generate(
        inference_pb2.GenerateRequest(generation=generation(n=2, best_of=3))
    )
    longest = sorted(texts, key=lambda text: len(tokens_of(text)), reverse=True)
    assert [choice.text for choice in best.choices] == longest[:2]
    request = inference_pb2.GenerateStreamRequest(generation=generation(n=3))
    messages = [message async for message in site.stub.GenerateStream(request)]
    streamed = ["", "", ""]
    for message in messages:
        streamed[message.choice_index] += message.text
    assert streamed == texts
    ends = [m.choice_index for m in messages if m.finish_reason == common_pb2.FINISH_REASON_STOP]
    assert sorted(ends) == [0, 1, 2]
    assert [message.HasField("usage") for message in messages] == [False] * (len(messages) - 1) + [
        True
    ]
    assert messages[-1].usage == answer.usage


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 17}, "n"),
        ({"n": 2147483647}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 21}, "best_of"),
    ],
    ids=str,
)
async def test_both_faces_refuse_the_same_numbers(
    site: Site, fields: dict[str, int], param: str
) -> None:
    body = await post(site, COMPLETION_PATH, {**COMPLETION, **fields}, status=400)
    assert body["error"]["param"] == param
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await site.stub.Generate(inference_pb2.GenerateRequest(generation=generation(**fields)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == body["error"]["message"]
    assert not site.router.generations


async def test_the_best_cannot_be_streamed(site: Site) -> None:
    body = {**COMPLETION, "best_of": 2, "stream": True}
    refused = await post(site, COMPLETION_PATH, body, status=400)
    assert refused["error"]["param"] == "best_of"
    request = inference_pb2.GenerateStreamRequest(generation=generation(best_of=2))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [message async for message in site.stub.GenerateStream(request)]
    assert caught.value.details() == refused["error"]["message"]


async def test_prompts_times_choices_are_bounded(site: Site) -> None:
    body = {**COMPLETION, "prompt": ["hi"] * 100, "n": 16}
    refused = await post(site, COMPLETION_PATH, body, status=400)
    assert refused["error"]["param"] == "n"
    assert not site.router.generations


async def test_a_client_that_leaves_closes_all_choices(site: Site) -> None:
    site.router.script = lambda request: [
        TokenBatch([5], choice_index=index) for index in range(request.num_choices)
    ]
    async with site.http.stream(
        "POST", CHAT_PATH, json={**CHAT, "n": 4, "stream": True}
    ) as response:
        await anext(response.aiter_lines())
    [left] = site.router.generations
    await left.closed.wait()
    assert site.ingress.serving.num_running == 0


async def test_more_prompts_than_can_ever_be_held_are_a_400(site: Site) -> None:
    site.router.places = 40
    body = {"model": "tiny", "prompt": ["hi"] * 11, "n": 4}
    error = (await post(site, COMPLETION_PATH, body, 400))["error"]
    assert error["param"] == "prompt"
    assert "11 entries of 4 choices each, but at most 10" in error["message"]
    assert site.router.generations == []
    await post(site, COMPLETION_PATH, {**body, "prompt": ["hi"] * 10})
