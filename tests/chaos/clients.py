"""Clients as no server likes them: they leave, dawdle, flood, ask for nonsense."""

import asyncio
import contextlib
import json
import random
import socket
import time
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import httpx
from relevo.v1 import inference_pb2, inference_pb2_grpc

from tests.chaos.load import Answer, ask, body_of
from tests.chaos.scenario import Stage
from tests.chaos.tcp_proxy import TcpProxy

LONG = {"model": "tiny", "prompt": "Say hello", "max_tokens": 600, "ignore_eos": True}


@contextlib.asynccontextmanager
async def _stub(stage: Stage) -> Any:
    address = f"127.0.0.1:{stage.cluster.served.grpc_port}"
    async with grpc.aio.insecure_channel(address) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def _generation(**fields: Any) -> inference_pb2.Generation:
    return inference_pb2.Generation(model="tiny", ignore_eos=True, **fields)


@dataclass(frozen=True, slots=True)
class CancelStorm:
    """So many requests at once on both faces, streamed or not, each left after moments."""

    num_requests: int = 200

    async def happen(self, stage: Stage) -> None:
        async with (
            httpx.AsyncClient(base_url=stage.cluster.served.url, limits=httpx.Limits()) as http,
            _stub(stage) as stub,
        ):
            leaving = [self._leave(stage.rng, http, stub, n) for n in range(self.num_requests)]
            await asyncio.gather(*leaving)

    async def _leave(self, rng: random.Random, http: httpx.AsyncClient, stub: Any, n: int) -> None:
        asking = [self._post, self._post_stream, self._call, self._call_stream][n % 4]
        patience_s = rng.choice([0.0, 0.005, 0.05, 0.2, 0.5]) * rng.random()
        with contextlib.suppress(TimeoutError, httpx.HTTPError, grpc.aio.AioRpcError):
            async with asyncio.timeout(patience_s):
                await asking(http if n % 4 < 2 else stub)

    async def _post(self, http: httpx.AsyncClient) -> None:
        await http.post("/v1/completions", json=LONG)

    async def _post_stream(self, http: httpx.AsyncClient) -> None:
        async with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            async for _ in answer.aiter_lines():
                pass

    async def _call(self, stub: Any) -> None:
        message = _generation(text="Say hello", max_tokens=600)
        await stub.Generate(inference_pb2.GenerateRequest(generation=message))

    async def _call_stream(self, stub: Any) -> None:
        message = _generation(text="Say hello", max_tokens=600)
        call = stub.GenerateStream(inference_pb2.GenerateStreamRequest(generation=message))
        async for _ in call:
            pass


@dataclass(frozen=True, slots=True)
class ShortDeadline:
    """A gRPC call for far more tokens than its deadline allows."""

    deadline_s: float = 0.2

    async def happen(self, stage: Stage) -> None:
        async with _stub(stage) as stub:
            message = _generation(text="Say hello", max_tokens=600)
            request = inference_pb2.GenerateRequest(generation=message)
            started_at_s = time.monotonic()
            with_code = None
            try:
                await stub.Generate(request, timeout=self.deadline_s)
            except grpc.aio.AioRpcError as error:
                with_code = error.code()
            assert with_code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert time.monotonic() - started_at_s < self.deadline_s + 5.0


@dataclass(frozen=True, slots=True)
class NeverFits:
    """A request within the model's length that no pool can ever hold."""

    async def happen(self, stage: Stage) -> None:
        started_at_s = time.monotonic()
        body = {**LONG, "max_tokens": 1000}
        response = await stage.cluster.http.post("/v1/completions", json=body)
        assert response.status_code == httpx.codes.BAD_REQUEST, response.text
        assert time.monotonic() - started_at_s < 5.0


# Every value a client might think of for a number.
NONSENSE = ("null", '"x"', "[]", "{}", "true", "NaN", "Infinity", "-Infinity", "-1", "0", "1e308")
NONSENSE += (str(2**31), str(2**63), str(2**64), "320", "-2147483649", "0.5")
FIELDS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "n")
FIELDS += ("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "best_of")
FIELDS += ("prompt", "stop", "stop_token_ids", "logit_bias", "bad_words", "allowed_token_ids")
FIELDS += ("priority", "echo", "prompt_logprobs", "stream_options", "structured_outputs")
RAW_BODIES = (b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"{" * 5000, b'{"prompt":' * 900)


@dataclass(frozen=True, slots=True)
class Nonsense:
    """Fields with values they cannot have, and bodies that are none; by lot of all pairs."""

    num_requests: int = 120

    async def happen(self, stage: Stage) -> None:
        bodies = [
            json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 2})[:-1].encode()
            + f', "{field}": {value}}}'.encode()
            for field in FIELDS
            for value in NONSENSE
        ]
        bodies = [*stage.rng.sample(bodies, self.num_requests), *RAW_BODIES]
        for start in range(0, len(bodies), 8):
            await asyncio.gather(*(self._post(stage, each) for each in bodies[start : start + 8]))

    async def _post(self, stage: Stage, body: bytes) -> None:
        response = await stage.cluster.http.post("/v1/completions", content=body)
        assert response.status_code < 500, (body[:200], response.text)
        if response.status_code != httpx.codes.OK:
            assert response.json()["error"]["message"]
            assert len(response.content) <= 16 * 1024


@dataclass(frozen=True, slots=True)
class Crowd:
    """So many clients at the same moment, far more than may wait; a refusal comes at once."""

    num_clients: int = 160
    refused_within_s: float = 1.0

    async def happen(self, stage: Stage) -> None:
        answers = [Answer("greedy", 60, "crowd") for _ in range(self.num_clients)]
        stage.extra += answers
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=stage.cluster.served.url, limits=limits, timeout=120.0
        ) as http:
            await asyncio.gather(*(ask(http, answer) for answer in answers))
        refused = [answer for answer in answers if answer.is_refused]
        assert refused, "nobody was refused"
        assert any(answer.is_complete for answer in answers), "nobody was served"


@dataclass(frozen=True, slots=True)
class CutClients:
    """Clients behind a network that is cut in the middle of their streams."""

    num_clients: int = 6

    async def happen(self, stage: Stage) -> None:
        async with TcpProxy(stage.cluster.served.http_port).running() as proxy:
            streams = await _streams_through(proxy, self.num_clients)
            proxy.cut()
            await asyncio.wait(streams)
            assert all(stream.exception() is not None for stream in streams)


@dataclass(frozen=True, slots=True)
class HalfOpenClients:
    """Clients that are gone without a word: nothing comes through any more, either way."""

    num_clients: int = 4
    duration_s: float = 2.0

    async def happen(self, stage: Stage) -> None:
        async with TcpProxy(stage.cluster.served.http_port).running() as proxy:
            streams = await _streams_through(proxy, self.num_clients)
            proxy.is_deaf = True
            await asyncio.sleep(self.duration_s)
            proxy.cut()
            await asyncio.wait(streams)


@dataclass(frozen=True, slots=True)
class Dribble:
    """A client whose bytes come one by one is served all the same."""

    async def happen(self, stage: Stage) -> None:
        port = stage.cluster.served.http_port
        answer = Answer("greedy", 12, "dribble")
        stage.extra.append(answer)
        async with (
            TcpProxy(port, chunk_bytes=16, pause_s=0.002).running() as proxy,
            httpx.AsyncClient(base_url=proxy.url, timeout=60.0) as http,
        ):
            await ask(http, answer)
        assert answer.is_complete, answer


@dataclass(frozen=True, slots=True)
class SlowReaders:
    """Clients that ask for long streams and read ten bytes a second."""

    num_clients: int = 4
    duration_s: float = 4.0

    async def happen(self, stage: Stage) -> None:
        loop = asyncio.get_running_loop()
        sockets = [self._open(stage.cluster.served.http_port) for _ in range(self.num_clients)]
        try:
            end_s = time.monotonic() + self.duration_s
            while time.monotonic() < end_s:
                for each in sockets:
                    with contextlib.suppress(BlockingIOError):
                        each.recv(10)
                await asyncio.sleep(1.0)
        finally:
            for each in sockets:
                loop.call_soon(each.close)
            await asyncio.sleep(0)

    def _open(self, port: int) -> socket.socket:
        opened = socket.socket()
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        opened.connect(("127.0.0.1", port))
        opened.setblocking(False)
        body = json.dumps({**body_of("logprobs", 400)}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        opened.send(head.encode() + body)
        return opened


async def _streams_through(proxy: TcpProxy, count: int) -> list[asyncio.Task[None]]:
    """Streams that have all begun."""
    begun = asyncio.Semaphore(0)

    async def stream() -> None:
        body = {**LONG, "stream": True}
        async with (
            httpx.AsyncClient(base_url=proxy.url, timeout=30.0) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            num_lines = 0
            async for _ in response.aiter_lines():
                num_lines += 1
                if num_lines == 4:
                    begun.release()

    streams = [asyncio.create_task(stream()) for _ in range(count)]
    async with asyncio.timeout(60.0):
        for _ in streams:
            await begun.acquire()
    return streams
