"""An ingress on loopback over a scripted router."""

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import httpx
import openai
import pytest
from relevo.v1 import inference_pb2_grpc

from api.config import IngressConfig, ModelConfig
from api.ingress import Ingress
from api.tokenizer import Tokenizer
from router.request import FinishReason, RoutedRequest, TokenBatch
from telemetry.config import TelemetryConfig
from telemetry.prometheus_sink import PrometheusSink
from tests.fake_router import FakeRouter, Step
from tests.tiny_tokenizer import EOS_TOKEN_ID, byte_level_backend, write_tokenizer

BACKEND = byte_level_backend()
KEY = "sk-right"
ANSWER = "Hello wörld 🦊"


def tokens_of(text: str) -> list[int]:
    return list(BACKEND.encode(text, add_special_tokens=False).ids)


def saying(
    text: str, *, end: FinishReason | None = FinishReason.STOP
) -> Callable[[RoutedRequest], Sequence[Step]]:
    """A script that says `text` token by token and then ends, or hangs when `end` is None."""
    steps: list[Step] = [TokenBatch([token_id]) for token_id in tokens_of(text)]
    if end is FinishReason.STOP:
        steps.append(TokenBatch([EOS_TOKEN_ID], end))
    elif end is not None:
        steps.append(TokenBatch([], end))
    return lambda _: list(steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A running ingress and its clients."""

    ingress: Ingress
    router: FakeRouter
    http: httpx.AsyncClient
    inside: httpx.AsyncClient  # the same face without a socket, for those who ask a hundred times
    openai: openai.AsyncOpenAI
    channel: grpc.aio.Channel
    stub: inference_pb2_grpc.InferenceServiceStub


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer.load(str(model_path))


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# ours\n{hashlib.sha256(KEY.encode()).hexdigest()}\n")
    return path


@asynccontextmanager
async def open_site(
    model_path: Path,
    tokenizer: Tokenizer,
    *,
    telemetry: TelemetryConfig | None = None,
    **config: object,
) -> AsyncIterator[Site]:
    router = FakeRouter()
    router.script = saying(ANSWER)
    settings = {"http_port": 0, "grpc_port": 0, "drain_s": 0.2, **config}
    ingress = Ingress(
        IngressConfig(**settings),  # type: ignore[arg-type]
        ModelConfig(model_id="tiny", path=str(model_path), revision="main"),
        router=router,
        sink=PrometheusSink(),
        tokenizer=tokenizer,
        telemetry=telemetry,
    )
    await ingress.start()
    url = f"http://127.0.0.1:{ingress.http_port}"
    # Plain HTTP: loading certificates would be most of a test's time.
    client = openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key=KEY,
        max_retries=0,
        http_client=httpx.AsyncClient(verify=False),
    )
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{ingress.grpc_port}")
    try:
        async with (
            httpx.AsyncClient(base_url=url, timeout=50, verify=False) as http,
            httpx.AsyncClient(
                base_url=url, transport=httpx.ASGITransport(app=ingress.app)
            ) as inside,
        ):
            yield Site(
                ingress=ingress,
                router=router,
                http=http,
                inside=inside,
                openai=client,
                channel=channel,
                stub=inference_pb2_grpc.InferenceServiceStub(channel),
            )
    finally:
        await client.close()
        await channel.close()
        await ingress.stop()


@pytest.fixture
async def site(model_path: Path, tokenizer: Tokenizer) -> AsyncIterator[Site]:
    async with open_site(model_path, tokenizer) as opened:
        yield opened


@pytest.fixture
async def locked_site(
    model_path: Path, tokenizer: Tokenizer, keys_file: Path
) -> AsyncIterator[Site]:
    async with open_site(model_path, tokenizer, api_keys_file=str(keys_file)) as opened:
        yield opened
