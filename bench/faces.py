"""What a face costs: processor time of the ingress for each streamed token and each chat request.

    .venv/bin/python -m bench.faces [--rounds 3] [--tokens 100] [--requests 30] [--model PATH]

`own`: a face alone, in this process and without a socket: detokenising, and writing events or
messages; for a chat also parsing, judging, laying out and tokenising it. `face`: an ingress in a
process of its own over a scripted router, with clients in this one, so that sockets and their
system calls are added. `bare`: the same libraries' servers when they do nothing but write. `all`:
with the real router and a scripted worker, so that the worker's message, the router and its metrics
are added, too. `idle` is what an ingress takes meanwhile without any request, in the same unit; it
is in the numbers of its process. A chat has some 500 tokens, and no two are alike. At last a few
streams are watched while a prompt of 500 kB comes in: the gaps between their tokens, against those
of a quiet time.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from google.protobuf.message import Message
from relevo.v1 import inference_pb2

from api.grpc_service import InferenceService
from api.ingress import Ingress
from bench.face_server import (
    CHAT_TOKENS,
    MODEL_ID,
    TEXT,
    FaceServer,
    chat_of,
    scripted_ingress,
    started,
    started_with_worker,
)
from rpc.token import create_token

NUM_STREAMS = 16
STEP_S = 0.02  # of scripted tokens; idle time costs no processor time
FAST_STEP_S = 0.005  # of the streams that are watched
NUM_WATCHED = 4  # streams beside the long prompt
WATCHED_TOKENS = 300

WORDS = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text().split()
NUM_WORDS = 320  # some 500 tokens

Stream = Callable[[int], Awaitable[object]]
Numbers = dict[str, list[float]]


class SocketlessContext:
    """As much of a gRPC call as a stream needs; messages are written to nobody."""

    def time_remaining(self) -> None:
        """There is no deadline."""

    async def send_initial_metadata(self, _: object) -> None:
        """Nobody reads it."""

    async def write(self, message: Message) -> None:
        """Do what gRPC does before it writes."""
        message.SerializeToString()


async def own_http(ingress: Ingress, num_tokens: int) -> None:
    """One stream over HTTP, to nobody."""
    body = {"prompt": "hi", "max_tokens": num_tokens, "stream": True}
    await _ask_app(ingress, "/v1/completions", body)


async def own_chat_http(ingress: Ingress, text: str) -> None:
    """One chat over HTTP, answered to nobody."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": CHAT_TOKENS}
    await _ask_app(ingress, "/v1/chat/completions", body)


async def _ask_app(ingress: Ingress, path: str, body: dict[str, object]) -> None:
    body = {"model": MODEL_ID, **body}
    messages: list[dict[str, object]] = [
        {"type": "http.request", "body": json.dumps(body).encode()}
    ]

    async def receive() -> dict[str, object]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(_: object) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    await ingress.app(scope, receive, send)


async def own_grpc(ingress: Ingress, num_tokens: int) -> None:
    """One stream over gRPC, to nobody."""
    generation = inference_pb2.Generation(model=MODEL_ID, text="hi", max_tokens=num_tokens)
    request = inference_pb2.GenerateStreamRequest(generation=generation)
    context: Any = SocketlessContext()
    await InferenceService(ingress.serving).GenerateStream(request, context)


async def own_chat_grpc(ingress: Ingress, text: str) -> None:
    """One chat over gRPC, answered to nobody; its message is read from bytes as gRPC does."""
    context: Any = SocketlessContext()
    data = inference_pb2.ChatRequest(chat=chat_of(text)).SerializeToString()
    request = inference_pb2.ChatRequest.FromString(data)
    answer = await InferenceService(ingress.serving).Chat(request, context)
    answer.SerializeToString()


def chat_text() -> str:
    """Words that no chat before had in this order."""
    return " ".join(random.choices(WORDS, k=NUM_WORDS))


async def own_chat_cost(chat: Callable[[str], Awaitable[None]], num_requests: int) -> float:
    """Milliseconds of this process's time for one chat after the other."""
    for _ in range(3):
        await chat(chat_text())
    texts = [chat_text() for _ in range(num_requests)]
    before_s = time.process_time()
    for text in texts:
        await chat(text)
    return 1e3 * (time.process_time() - before_s) / num_requests


async def own_cost(stream: Stream, num_tokens: int) -> float:
    """Microseconds of this process's time for each token of 16 streams at once."""
    await asyncio.gather(*(stream(4) for _ in range(NUM_STREAMS)))
    before_s = time.process_time()
    await asyncio.gather(*(stream(num_tokens) for _ in range(NUM_STREAMS)))
    return 1e6 * (time.process_time() - before_s) / (NUM_STREAMS * num_tokens)


async def token_cost(server: FaceServer, stream: Stream, num_tokens: int) -> float:
    """The same of the ingress's process."""
    await asyncio.gather(*(stream(4) for _ in range(NUM_STREAMS)))
    before_s = await server.cpu_s()
    await asyncio.gather(*(stream(num_tokens) for _ in range(NUM_STREAMS)))
    return 1e6 * (await server.cpu_s() - before_s) / (NUM_STREAMS * num_tokens)


async def chat_cost(
    server: FaceServer, chat: Callable[[str], Awaitable[None]], num_requests: int
) -> float:
    """Milliseconds of the ingress's time for one chat after the other."""
    for _ in range(3):
        await chat(chat_text())
    before_s = await server.cpu_s()
    for _ in range(num_requests):
        await chat(chat_text())
    return 1e3 * (await server.cpu_s() - before_s) / num_requests


async def gap_p99(server: FaceServer, *, prompt: str = "") -> float:
    """99th percentile of the gaps of a few streams, in ms; beside a prompt when there is one."""
    streams = [asyncio.create_task(server.stream_http(WATCHED_TOKENS)) for _ in range(NUM_WATCHED)]
    await asyncio.sleep(20 * FAST_STEP_S)
    if prompt:
        await server.chat_http(prompt)
    gaps = [gap for stream in streams for gap in await stream]
    return 1e3 * statistics.quantiles(gaps, n=100)[98]


async def idle(num_tokens: int) -> None:
    """Ask for nothing, as long as a stream takes."""
    await asyncio.sleep(num_tokens * STEP_S)


async def measure(options: argparse.Namespace, token_file: Path) -> Numbers:
    """Return all numbers by name, those of each round."""
    numbers: Numbers = {}

    def note(name: str, number: float) -> None:
        numbers.setdefault(name, []).append(round(number, 3))

    alone = scripted_ingress(options.model, step_s=0.0)
    token_ids = alone.serving.tokenizer.encode_word(TEXT)
    steps = ("--model", options.model, "--step-s", str(STEP_S))
    async with (
        started(("--step-s", str(STEP_S)), module="bench.bare_server") as bare,
        started(steps) as face,
        started_with_worker(options.model, token_file, token_ids, step_s=STEP_S) as everything,
    ):
        for _ in range(options.rounds):
            for name, own in (("http", own_http), ("grpc", own_grpc)):
                cost = await own_cost(partial(own, alone), options.tokens)
                note(f"own {name}, us per token", cost)
            for name, own_chat in (("http", own_chat_http), ("grpc", own_chat_grpc)):
                cost = await own_chat_cost(partial(own_chat, alone), options.requests)
                note(f"own {name}, ms per chat", cost)
            for label, server in (("bare", bare), ("face", face), ("all", everything)):
                for name, ask in (
                    ("idle", idle),
                    ("http", server.stream_http),
                    ("grpc", server.stream_grpc),
                ):
                    cost = await token_cost(server, ask, options.tokens)
                    note(f"{label} {name}, us per token", cost)
            for name, chat in (("http", face.chat_http), ("grpc", face.chat_grpc)):
                cost = await chat_cost(face, chat, options.requests)
                note(f"face {name}, ms per chat", cost)
    long = TEXT * (500_000 // len(TEXT))
    async with started(("--model", options.model, "--step-s", str(FAST_STEP_S))) as watched:
        for _ in range(options.rounds):
            note("gap p99 ms, quiet", await gap_p99(watched))
            note("gap p99 ms, beside 500 kB", await gap_p99(watched, prompt=long))
    return numbers


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=".models/smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--requests", type=int, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        token_file = Path(folder) / "token"
        create_token(token_file)
        numbers = uvloop.run(measure(options, token_file))
    for name, rounds in numbers.items():
        print(f"{name:28} median {statistics.median(rounds):9.2f}  of {rounds}")


if __name__ == "__main__":
    main()
