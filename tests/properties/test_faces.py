"""One chat through every face: the same words, whole and streamed."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relevo.v1 import inference_pb2

from tests.properties.client import Client
from tests.properties.conftest import Cluster

Json = dict[str, Any]

TURNS = st.lists(st.text("abc é🦊<>{}\n", min_size=1, max_size=12), min_size=1, max_size=3)


def post(client: Client, path: str, body: Json) -> Any:
    response = client.http.post(path, json={"model": "tiny", "temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response


def events(client: Client, path: str, body: Json) -> list[Json]:
    lines = post(client, path, {**body, "stream": True}).text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def chat_completion(client: Client, turns: list[Json]) -> list[str]:
    body = {"messages": turns, "max_completion_tokens": 8}
    whole = post(client, "/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    chunks = events(client, "/v1/chat/completions", body)
    return [whole, "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)]


def message(client: Client, turns: list[Json]) -> list[str]:
    body = {"messages": turns, "max_tokens": 8}
    whole = post(client, "/v1/messages", body).json()["content"]
    told = events(client, "/v1/messages", body)
    deltas = [event["delta"]["text"] for event in told if event["type"] == "content_block_delta"]
    return ["".join(block["text"] for block in whole), "".join(deltas)]


def response(client: Client, turns: list[Json]) -> list[str]:
    body = {"input": turns, "max_output_tokens": 8}
    whole = post(client, "/v1/responses", body).json()
    told = events(client, "/v1/responses", body)
    deltas = [each["delta"] for each in told if each["type"] == "response.output_text.delta"]
    ends = [whole, told[-1]["response"]]
    texts = ["".join(item["content"][0]["text"] for item in end["output"]) for end in ends]
    return [*texts, "".join(deltas)]


def grpc_chat(client: Client, turns: list[Json]) -> list[str]:
    chat = inference_pb2.Chat(
        messages=[inference_pb2.ChatMessage(**turn) for turn in turns],
        generation=inference_pb2.Generation(model="tiny", temperature=0, max_tokens=8),
    )
    whole = client.stub.Chat(inference_pb2.ChatRequest(chat=chat), timeout=60)
    pieces = client.stub.ChatStream(inference_pb2.ChatStreamRequest(chat=chat), timeout=60)
    return [whole.choices[0].message.content, "".join(piece.content for piece in pieces)]


@pytest.mark.slow
@pytest.mark.timeout(180)
@settings(max_examples=3, deadline=None)
@given(texts=TURNS)
def test_every_face_says_the_same_whole_and_streamed(cluster: Cluster, texts: list[str]) -> None:
    roles = ["user", "assistant"]
    # An odd number of turns: the user speaks last.
    turns = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    turns = turns if len(turns) % 2 else turns[:-1]
    answers = [
        answer
        for ask in (chat_completion, message, response, grpc_chat)
        for answer in ask(cluster.handed_over, turns)
    ]
    assert answers == [answers[0]] * len(answers)
