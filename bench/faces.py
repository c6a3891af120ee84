"""What a face costs: processor time of the ingress for each streamed token and each chat request.

    .venv/bin/python -m bench.faces [--tokens 200] [--requests 100] [--model PATH]

The ingress runs in a process of its own over a scripted router, its clients in this one, so only
parsing, template, tokenising, judging, detokenising and writing are counted. Then it streams to a
few clients while a prompt of 500 kB comes in, and compares the gaps between their tokens with
those of a quiet run.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import httpx
from relevo.v1 import inference_pb2, inference_pb2_grpc

from api.config import IngressConfig, ModelConfig
from api.ingress import Ingress
from bench.scripted_upstream import ScriptedUpstream
from telemetry.prometheus_sink import PrometheusSink

MODEL_ID = "demo"
TEXT = "The quick brown fox jumps over the lazy dog, and then it goes home. "
NUM_STREAMS = 16
STEP_S = 0.005  # of the scripted router; idle time costs no processor time
NUM_WATCHED = 4  # streams beside the long prompt
WATCHED_TOKENS = 300


def ingress_of(model: str, *, step_s: float) -> Ingress:
    """Return an ingress over a router that repeats a text."""
    upstream = ScriptedUpstream([1], model_id=MODEL_ID, step_s=step_s)
    ingress = Ingress(
        IngressConfig(http_port=0, grpc_port=0),
        ModelConfig(model_id=MODEL_ID, path=model),
        router=upstream,
        sink=PrometheusSink(),
    )
    upstream.token_ids = ingress.serving.tokenizer.encode_word(TEXT)
    return ingress


async def serve(model: str) -> None:
    """Run the ingress; a line on stdin asks for the processor time used so far."""
    ingress = ingress_of(model, step_s=STEP_S)
    await ingress.start()
    print(ingress.http_port, ingress.grpc_port, flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(time.process_time(), flush=True)
    await ingress.stop()


class Server:
    """The ingress's process, and clients of it."""

    def __init__(self, process: asyncio.subprocess.Process, http_port: int, grpc_port: int) -> None:
        self._process = process
        self.http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{http_port}", timeout=60, verify=False
        )
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}")
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)  # type: ignore[no-untyped-call]

    async def cpu_s(self) -> float:
        """Processor time of the ingress so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return float(await self._process.stdout.readline())

    async def stream_http(self, num_tokens: int) -> list[float]:
        """Read one stream and return the gaps between its events, in seconds."""
        body = {"model": MODEL_ID, "prompt": "hi", "max_tokens": num_tokens, "stream": True}
        gaps, last_s = [], time.monotonic()
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_raw():
                now_s = time.monotonic()
                gaps.append(now_s - last_s)
                last_s = now_s
        return gaps[1:]

    async def stream_grpc(self, num_tokens: int) -> None:
        """Read one stream."""
        generation = inference_pb2.Generation(model=MODEL_ID, text="hi", max_tokens=num_tokens)
        request = inference_pb2.GenerateStreamRequest(generation=generation)
        async for _ in self.stub.GenerateStream(request):
            pass

    async def chat_http(self, text: str) -> None:
        """Have one chat answered."""
        body = {"model": MODEL_ID, "messages": [{"role": "user", "content": text}]}
        answer = await self.http.post("/v1/chat/completions", json={**body, "max_tokens": 1})
        answer.raise_for_status()

    async def chat_grpc(self, text: str) -> None:
        """Have one chat answered."""
        chat = inference_pb2.Chat(
            messages=[inference_pb2.ChatMessage(role="user", content=text)],
            generation=inference_pb2.Generation(model=MODEL_ID, max_tokens=1),
        )
        await self.stub.Chat(inference_pb2.ChatRequest(chat=chat))


@asynccontextmanager
async def started(model: str) -> AsyncIterator[Server]:
    """Start the ingress in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.faces", "--serve", "--model", model),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    http_port, grpc_port = (await process.stdout.readline()).split()
    server = Server(process, int(http_port), int(grpc_port))
    try:
        yield server
    finally:
        await server.http.aclose()
        await server.channel.close()
        process.stdin.close()
        await process.wait()


async def cost_per_token(server: Server, num_tokens: int, *, is_grpc: bool) -> float:
    """Microseconds of processor time for each token of 16 streams at once."""
    stream = server.stream_grpc if is_grpc else server.stream_http
    await asyncio.gather(*(stream(8) for _ in range(NUM_STREAMS)))
    before_s = await server.cpu_s()
    await asyncio.gather(*(stream(num_tokens) for _ in range(NUM_STREAMS)))
    return 1e6 * (await server.cpu_s() - before_s) / (NUM_STREAMS * num_tokens)


async def cost_per_chat(server: Server, num_requests: int, text: str, *, is_grpc: bool) -> float:
    """Milliseconds of processor time for one chat after the other."""
    chat = server.chat_grpc if is_grpc else server.chat_http
    for _ in range(5):
        await chat(text)
    before_s = await server.cpu_s()
    for _ in range(num_requests):
        await chat(text)
    return 1e3 * (await server.cpu_s() - before_s) / num_requests


async def gap_p99(server: Server, *, prompt: str = "") -> float:
    """99th percentile of the gaps of a few streams, in ms; beside a prompt when there is one."""
    streams = [asyncio.create_task(server.stream_http(WATCHED_TOKENS)) for _ in range(NUM_WATCHED)]
    await asyncio.sleep(20 * STEP_S)
    if prompt:
        await server.chat_http(prompt)
    gaps = [gap for stream in streams for gap in await stream]
    return 1e3 * statistics.quantiles(gaps, n=100)[98]


async def cost_in_process(model: str, num_tokens: int) -> float:
    """The same over HTTP without a socket: detokenising and writing events alone."""
    ingress = ingress_of(model, step_s=0.0)

    async def stream(num: int) -> None:
        body = {"model": MODEL_ID, "prompt": "hi", "max_tokens": num, "stream": True}
        messages: list[dict[str, object]] = [
            {"type": "http.request", "body": json.dumps(body).encode()}
        ]

        async def receive() -> dict[str, object]:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop()

        async def send(_: object) -> None:
            pass

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        await ingress.app(scope, receive, send)

    await asyncio.gather(*(stream(8) for _ in range(NUM_STREAMS)))
    before_s = time.process_time()
    await asyncio.gather(*(stream(num_tokens) for _ in range(NUM_STREAMS)))
    return 1e6 * (time.process_time() - before_s) / (NUM_STREAMS * num_tokens)


async def measure(options: argparse.Namespace) -> dict[str, float]:
    """Return all numbers by name."""
    chat = TEXT * 32  # some 500 tokens
    numbers = {"in_process_us_per_token": await cost_in_process(options.model, options.tokens)}
    async with started(options.model) as server:
        count = await server.http.post("/tokenize", json={"prompt": chat})
        numbers["chat_tokens"] = count.json()["count"]
        for name, is_grpc in (("http", False), ("grpc", True)):
            numbers[f"{name}_us_per_token"] = await cost_per_token(
                server, options.tokens, is_grpc=is_grpc
            )
            numbers[f"{name}_ms_per_chat"] = await cost_per_chat(
                server, options.requests, chat, is_grpc=is_grpc
            )
        numbers["gap_p99_ms_quiet"] = await gap_p99(server)
        numbers["gap_p99_ms_beside_500_kb"] = await gap_p99(
            server, prompt=TEXT * (500_000 // len(TEXT))
        )
    return numbers


def main() -> None:
    """Print the numbers, or serve for them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", default=".models/smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--requests", type=int, default=100)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.model))
        return
    numbers = asyncio.run(measure(options))
    print(json.dumps({name: round(number, 3) for name, number in numbers.items()}, indent=2))


if __name__ == "__main__":
    main()
