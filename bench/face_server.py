"""An ingress in a process of its own, for `bench.faces`: over a scripted router or a real one.

    .venv/bin/python -m bench.face_server --model PATH --step-s S [--worker JSON --token-file FILE]

Prints its ports; then each line on stdin asks for the processor time it has used.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import httpx
import uvloop
from relevo.v1 import inference_pb2, inference_pb2_grpc

from api.config import IngressConfig, ModelConfig
from api.ingress import Ingress
from api.upstream import Upstream
from bench.scripted_upstream import ScriptedUpstream
from router.config import RouterConfig
from router.discovery import StaticDiscovery
from router.router import Router
from rpc.channel import ChannelPool
from rpc.config import RpcConfig
from rpc.description import WorkerDescription
from rpc.token import read_token
from telemetry.metrics import Metrics
from telemetry.prometheus_sink import PrometheusSink

MODEL_ID = "demo"
CHAT_TOKENS = 1  # of an answer: what more there are is counted by the token
TEXT = "The quick brown fox jumps over the lazy dog, and then it goes home. "


def ingress_over(model: str, router: Upstream, sink: PrometheusSink) -> Ingress:
    """An ingress that is not started."""
    return Ingress(
        IngressConfig(http_port=0, grpc_port=0, drain_s=1.0),
        ModelConfig(model_id=MODEL_ID, path=model),
        router=router,
        sink=sink,
    )


def scripted_ingress(model: str, *, step_s: float) -> Ingress:
    """An ingress over a router that repeats a text."""
    upstream = ScriptedUpstream([1], model_id=MODEL_ID, step_s=step_s)
    ingress = ingress_over(model, upstream, PrometheusSink())
    upstream.token_ids = ingress.serving.tokenizer.encode_word(TEXT)
    return ingress


async def routed_ingress(model: str, worker: str, token_file: str) -> Ingress:
    """An ingress over the real router and one worker of another process."""
    sink = PrometheusSink()
    router = Router(
        RouterConfig(),
        StaticDiscovery([WorkerDescription.from_dict(json.loads(worker))]),
        ChannelPool(token=read_token(token_file), config=RpcConfig()),
        ingress_id="bench",
        metrics=Metrics(sink),
    )
    await router.start()
    while not router.is_ready():  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.02)
    return ingress_over(model, router, sink)


async def serve(options: argparse.Namespace) -> None:
    """Run the ingress until stdin ends."""
    if options.worker:
        ingress = await routed_ingress(options.model, options.worker, options.token_file)
    else:
        ingress = scripted_ingress(options.model, step_s=options.step_s)
    await ingress.start()
    await tell_cpu_s(ingress.http_port, ingress.grpc_port)
    await ingress.stop()


async def tell_cpu_s(http_port: int, grpc_port: int) -> None:
    """Print the ports, then for each line on stdin the processor time so far; until it ends."""
    print(http_port, grpc_port, flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(time.process_time(), flush=True)


def chat_of(text: str) -> inference_pb2.Chat:
    """A chat of one message."""
    return inference_pb2.Chat(
        messages=[inference_pb2.ChatMessage(role="user", content=text)],
        generation=inference_pb2.Generation(model=MODEL_ID, max_tokens=CHAT_TOKENS),
    )


class FaceServer:
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
        answer = await self.http.post(
            "/v1/chat/completions", json={**body, "max_tokens": CHAT_TOKENS}
        )
        answer.raise_for_status()

    async def chat_grpc(self, text: str) -> None:
        """Have one chat answered."""
        await self.stub.Chat(inference_pb2.ChatRequest(chat=chat_of(text)))


@asynccontextmanager
async def process_of(module: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a module until the block ends, with pipes to it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


@asynccontextmanager
async def started(
    arguments: Sequence[str], *, module: str = "bench.face_server"
) -> AsyncIterator[FaceServer]:
    """An ingress with these arguments, or another server that answers its streams."""
    async with process_of(module, *arguments) as process:
        assert process.stdout is not None
        http_port, grpc_port = (await process.stdout.readline()).split()
        server = FaceServer(process, int(http_port), int(grpc_port))
        try:
            yield server
        finally:
            await server.http.aclose()
            await server.channel.close()


@asynccontextmanager
async def started_with_worker(
    model: str, token_file: Path, token_ids: Sequence[int], *, step_s: float
) -> AsyncIterator[FaceServer]:
    """An ingress with the real router, and a scripted worker."""
    script = (str(token_file), str(step_s), *map(str, token_ids))
    async with process_of("bench.scripted_worker", *script) as worker:
        assert worker.stdout is not None
        description = (await worker.stdout.readline()).decode().strip()
        arguments = ("--worker", description, "--token-file", str(token_file))
        async with started(("--model", model, *arguments)) as server:
            yield server


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--step-s", type=float, default=0.005)
    parser.add_argument("--worker", default="")
    parser.add_argument("--token-file", default="")
    uvloop.run(serve(parser.parse_args()))  # as in a cluster, where Ray installs it


if __name__ == "__main__":
    main()
