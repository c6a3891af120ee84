"""Clients that read slowly or not at all: they are ended, in bounded memory, and nobody waits."""

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import grpc.aio
import orjson
import psutil
import pytest
from relevo.v1 import inference_pb2, inference_pb2_grpc

from api.tokenizer import Tokenizer
from router.request import TokenBatch
from tests.fake_router import FakeRouter
from tests.integration.api.conftest import ANSWER, Site, open_site, saying, tokens_of

COMPLETION = {"model": "tiny", "prompt": "hi", "stream": True}
STALLED_READER_S = 1.5
WORD = tokens_of("abcdefghij" * 20)


class Endless(Sequence[TokenBatch]):
    """A script that never ends, and never makes the loop wait."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: object) -> TokenBatch:  # type: ignore[override]
        return TokenBatch(list(WORD))

    def __iter__(self):  # type: ignore[no-untyped-def]
        return itertools.islice(itertools.repeat(TokenBatch(list(WORD))), 20_000)


@pytest.fixture
async def site(model_path: Path, tokenizer: Tokenizer) -> AsyncIterator[Site]:
    async with open_site(model_path, tokenizer, stalled_reader_s=STALLED_READER_S) as opened:
        opened.router.script = lambda request: (
            Endless() if request.request_label == "flood" else saying(ANSWER)(request)
        )
        yield opened


def connect_narrowly(port: int) -> socket.socket:
    """A client that takes a few kilobytes and then no more."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.setblocking(False)
    return client


async def stall_over_http(site: Site) -> socket.socket:
    body = orjson.dumps(COMPLETION)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: flood\r\n"
    client = connect_narrowly(site.ingress.http_port)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(client, f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return client


async def closed_within(router: FakeRouter, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not all(each.is_closed for each in router.generations):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_an_http_client_that_stops_reading_is_ended(site: Site) -> None:
    client = await stall_over_http(site)
    await site.router.started.wait()
    flood = site.router.generations[0]
    num_sent = -1
    while num_sent != flood.report.num_completion_tokens:
        num_sent = flood.report.num_completion_tokens
        await asyncio.sleep(0.1)
    assert not flood.is_closed
    rss_before = psutil.Process().memory_info().rss
    answer = await site.http.post("/v1/completions", json={**COMPLETION, "stream": False})
    assert answer.json()["choices"][0]["text"] == ANSWER
    assert flood.report.num_completion_tokens == num_sent  # nothing is read ahead for it
    await closed_within(site.router, 3 * STALLED_READER_S + 20)
    assert site.ingress.serving.num_running == 0
    assert psutil.Process().memory_info().rss - rss_before < 16 << 20
    # The connection is gone, too: what was on its way can be read, and then comes its end.
    num_read = 0
    loop = asyncio.get_running_loop()
    try:
        while data := await asyncio.wait_for(loop.sock_recv(client, 1 << 20), 30):
            num_read += len(data)
    except ConnectionError:
        pass
    assert num_read < 256 * 1024
    client.close()


async def test_a_slow_http_client_that_reads_on_is_served(site: Site) -> None:
    site.router.script = saying("abcdefghij" * 30)
    client = await stall_over_http(site)
    loop, text = asyncio.get_running_loop(), b""
    async with asyncio.timeout(40):
        while b"[DONE]" not in text:
            text += await loop.sock_recv(client, 4096)
            await asyncio.sleep(0.01)
    client.close()


async def test_a_grpc_client_that_stops_reading_is_ended(site: Site) -> None:
    request = inference_pb2.GenerateStreamRequest(
        generation=inference_pb2.Generation(model="tiny", text="hi")
    )
    # A narrow window, that it may be full soon.
    narrow = grpc.aio.insecure_channel(
        f"127.0.0.1:{site.ingress.grpc_port}",
        options=(
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", 16384),
        ),
    )
    stub = inference_pb2_grpc.InferenceServiceStub(narrow)
    flood = stub.GenerateStream(request, metadata=(("x-request-id", "flood"),))
    await flood.read()
    canary = inference_pb2.GenerateRequest(generation=request.generation)
    assert (await site.stub.Generate(canary, timeout=30)).text == ANSWER
    await closed_within(site.router, 3 * STALLED_READER_S + 20)
    assert site.ingress.serving.num_running == 0
    # What lay in its window can still be read; then it hears why it ended.
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await flood.read() is not grpc.aio.EOF:
            pass
    assert await flood.code() is grpc.StatusCode.CANCELLED
    await narrow.close()
