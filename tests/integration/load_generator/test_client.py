"""The client over real sockets: what it measures, tolerates and gives up."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from load_generator.client import Client
from load_generator.outcome import Ending, Outcome
from load_generator.planned_request import PlannedRequest
from tests.fake_openai_server import FakeOpenAIServer, serving
from tests.patience import comes_true


def request(num_tokens: int = 4, **behaviour: Any) -> PlannedRequest:
    body = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": num_tokens, "stream": True}
    return PlannedRequest(
        due_s=0.0,
        body=json.dumps(body).encode(),
        num_prompt_tokens=3,
        num_output_tokens=num_tokens,
        **behaviour,
    )


@asynccontextmanager
async def client_of(server: FakeOpenAIServer, **settings: Any) -> AsyncIterator[Client]:
    async with serving(server), Client(server.url, **settings) as client:
        yield client


async def ask(server: FakeOpenAIServer, asked: PlannedRequest, **settings: Any) -> Outcome:
    async with client_of(server, **settings) as client:
        return await client.ask(asked, client._now())


async def test_times_are_those_of_the_tokens() -> None:
    server = FakeOpenAIServer(first_token_s=0.05, step_s=0.02)
    outcome = await ask(server, request(4))
    assert outcome.ending is Ending.COMPLETED
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens) == (3, 4)
    assert outcome.ttft_s is not None
    assert outcome.tpot_s is not None
    assert outcome.ttft_s >= 0.05
    assert outcome.tpot_s >= 0.02
    told_s = outcome.token_times_s
    assert len(told_s) == 4
    assert outcome.ttft_s == told_s[0] - outcome.due_s
    assert outcome.tpot_s == pytest.approx((told_s[-1] - told_s[0]) / 3)
    assert all(sent <= taken for sent, taken in zip(server.sent_s, told_s, strict=True))
    assert outcome.finish_reason == "length"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_server_that_counts_nothing_is_counted(path: str) -> None:
    server = FakeOpenAIServer(tells_usage=False)
    outcome = await ask(server, request(5), path=path, api_key="sk-1")
    assert outcome.ending is Ending.COMPLETED
    assert outcome.num_output_tokens == 5
    assert server.headers[0]["Authorization"] == "Bearer sk-1"


async def test_a_refusal_is_retried_when_the_server_says() -> None:
    answers = iter([429, 503, 200])
    server = FakeOpenAIServer(verdict=lambda _: next(answers), retry_after="0.05")
    outcome = await ask(server, request(retries=2))
    assert outcome.ending is Ending.COMPLETED
    assert outcome.num_attempts == 3
    assert outcome.ttft_s is not None
    assert outcome.ttft_s >= 0.1  # the waiting is part of what the client saw


async def test_a_refusal_without_retries_is_an_error_in_the_servers_words() -> None:
    outcome = await ask(FakeOpenAIServer(verdict=lambda _: 429), request())
    assert outcome.ending is Ending.FAILED
    assert outcome.error == "429: refused with 429"


async def test_a_mistake_is_not_sent_again() -> None:
    server = FakeOpenAIServer(verdict=lambda _: 400)
    outcome = await ask(server, request(retries=3))
    assert outcome.error == "400: refused with 400"
    assert len(server.bodies) == 1


async def test_a_broken_stream_is_an_error_and_may_be_tried_again() -> None:
    server = FakeOpenAIServer(breaks_after=2)
    outcome = await ask(server, request())
    assert outcome.ending is Ending.FAILED
    assert outcome.error.startswith("the connection broke")
    again = await ask(server, request(retries=1))
    assert again.num_attempts == 2
    assert len(again.token_times_s) == 2  # of the last attempt alone


async def test_nobody_listens() -> None:
    async with Client("http://127.0.0.1:9") as client:
        outcome = await client.ask(request(), 0.0)
    assert outcome.error == "the connection broke: ClientConnectorError"


async def test_a_client_that_leaves_closes_its_connection() -> None:
    server = FakeOpenAIServer(step_s=0.02)
    async with client_of(server) as client:
        outcome = await client.ask(request(1000, cancel_after_tokens=2), 0.0)
        assert outcome.ending is Ending.CANCELLED
        assert len(outcome.token_times_s) == 2
        assert await comes_true(lambda: server.num_left == 1, 20.0)


async def test_a_slow_reader_holds_up_the_server_and_not_itself_only() -> None:
    server = FakeOpenAIServer()
    outcome = await ask(server, request(10, read_tokens_per_s=100.0))
    assert outcome.ending is Ending.COMPLETED
    assert outcome.e2e_s >= 0.09


async def test_an_answer_that_does_not_end_in_time_is_an_error() -> None:
    outcome = await ask(FakeOpenAIServer(step_s=30.0), request(), timeout_s=0.1)
    assert outcome.ending is Ending.FAILED
    assert outcome.error == "no end within 0.1 s"
