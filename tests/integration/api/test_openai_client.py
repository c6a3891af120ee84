"""The official client against the ingress."""

import openai
import pytest

from router.errors import GenerationFailed, NoWorkers, QueueFull, RequestTimeout
from router.request import FinishReason
from tests.integration.api.conftest import ANSWER, Site, saying, tokens_of

MESSAGES = [{"role": "user", "content": "hi"}]


async def test_a_chat_is_answered_with_usage(site: Site) -> None:
    answer = await site.openai.chat.completions.create(model="tiny", messages=MESSAGES)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(tokens_of(ANSWER)) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


async def test_the_time_parts_of_usage_add_up(site: Site) -> None:
    body = {"model": "tiny", "prompt": "hi"}
    usage = (await site.http.post("/v1/completions", json=body)).json()["usage"]
    total = usage["prompt_time"] + usage["completion_time"]
    assert abs(usage["total_time"] - total) < 1e-9
    assert usage["queue_time"] == pytest.approx(0.0015)
    assert usage["kv_transfer_time"] == 0.004


async def test_a_chat_streams_the_same_text(site: Site) -> None:
    stream = await site.openai.chat.completions.create(
        model="tiny",
        messages=MESSAGES,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == ANSWER
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []
    assert {(chunk.id, chunk.created) for chunk in chunks} == {(chunks[0].id, chunks[0].created)}


async def test_a_list_of_prompts_gives_a_choice_each(site: Site) -> None:
    site.router.script = lambda request: saying("x" * len(request.token_ids))(request)
    answer = await site.openai.completions.create(model="tiny", prompt=["a", "abc", "ab"])
    assert [choice.text for choice in answer.choices] == [
        "x" * len(tokens_of(prompt)) for prompt in ("a", "abc", "ab")
    ]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(tokens_of(each)) for each in ("a", "abc", "ab"))


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [5, 6], [[5, 6], [7]]], ids=repr)
async def test_every_form_of_prompt_is_taken(site: Site, prompt: str) -> None:
    stream = await site.openai.completions.create(model="tiny", prompt=prompt, stream=True)
    texts: dict[int, str] = {}
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert set(texts.values()) == {ANSWER}


async def test_max_tokens_defaults_to_16_for_completions_and_the_rest_for_chats(
    site: Site,
) -> None:
    await site.openai.completions.create(model="tiny", prompt="hi")
    await site.openai.chat.completions.create(model="tiny", messages=MESSAGES)  # type: ignore[arg-type]
    first, second = (generation.request for generation in site.router.generations)
    assert first.sampling.max_tokens == 16
    assert second.sampling.max_tokens == 256 - len(second.token_ids)


async def test_models_are_listed(site: Site) -> None:
    models = [model async for model in site.openai.models.list()]
    assert [model.id for model in models] == ["tiny"]
    assert (await site.openai.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError):
        await site.openai.models.retrieve("other/model")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "expected", "status"),
    [
        (QueueFull("full", 3.2), openai.RateLimitError, 429),
        (NoWorkers("none", 2.0), openai.InternalServerError, 503),
        (RequestTimeout("late"), openai.InternalServerError, 504),
        (GenerationFailed("/home/secret: broke"), openai.InternalServerError, 500),
    ],
)
async def test_an_error_before_the_first_token_is_a_status(
    site: Site, stream: bool, error: Exception, expected: type[openai.APIStatusError], status: int
) -> None:
    site.router.script = lambda _: [error]
    with pytest.raises(expected) as caught:
        await site.openai.chat.completions.create(
            model="tiny",
            messages=MESSAGES,  # type: ignore[arg-type]
            stream=stream,
        )
    assert caught.value.status_code == status
    assert "secret" not in str(caught.value)
    if status in {429, 503}:
        assert int(caught.value.response.headers["retry-after"]) >= 2


async def test_an_error_inside_a_stream_reaches_the_client(site: Site) -> None:
    site.router.script = lambda request: [
        *saying("abc", end=None)(request),
        GenerationFailed("boom"),
    ]
    stream = await site.openai.chat.completions.create(
        model="tiny",
        messages=MESSAGES,  # type: ignore[arg-type]
        stream=True,
    )
    chunks = aiter(stream)
    texts = [(await anext(chunks)).choices[0].delta.content for _ in range(4)]
    assert texts == ["", "a", "b", "c"]
    with pytest.raises(openai.APIError):
        await anext(chunks)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_text_and_the_generation(site: Site, stream: bool) -> None:
    site.router.script = saying("one two three", end=None)
    body = {"model": "tiny", "prompt": "hi", "stop": ["o th"], "stream": stream}
    response = await site.http.post("/v1/completions", json=body)
    assert "one tw" in response.text or stream
    assert "three" not in response.text
    assert site.router.generations[0].is_closed
    assert site.router.generations[0].close_reason is FinishReason.STOP
    if not stream:
        choice = response.json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("one tw", "stop")


async def test_a_length_finish_is_told(site: Site) -> None:
    site.router.script = saying("abc", end=FinishReason.LENGTH)
    answer = await site.openai.completions.create(model="tiny", prompt="hi", max_tokens=3)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abc", "length")
