"""Requests made to break something: bombs, forged fields, urls, labels."""

import asyncio
import contextlib
import logging
import random
import socket
import time
from collections.abc import Iterator

import grpc
import grpc.aio
import orjson
import psutil
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from relevo.v1 import (
    common_pb2,
    decode_pb2,
    inference_pb2,
    prefill_pb2,
    state_pb2,
)

from router.errors import GenerationFailed
from telemetry import provider
from telemetry.config import TelemetryConfig
from tests.integration.api.conftest import ANSWER, KEY, Site, saying

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "tiny", "prompt": "hi"}
PATHS = ("/v1/completions", "/v1/chat/completions")
TWO_31, TWO_63 = 2**31, 2**63


def completion(**fields: object) -> bytes:
    return orjson.dumps({**COMPLETION, **fields})


def chat(**fields: object) -> bytes:
    return orjson.dumps({**CHAT, **fields})


def content(*parts: object) -> bytes:
    return chat(messages=[{"role": "user", "content": list(parts)}])


BOMBS: dict[str, tuple[str, bytes]] = {
    "n": (PATHS[0], completion(n=TWO_31)),
    "best_of": (PATHS[0], completion(best_of=TWO_31)),
    "1e5 prompts": (PATHS[0], completion(prompt=["a"] * 100_000)),
    "a prompt of 1e5 ids": (PATHS[0], completion(prompt=[5] * 100_000)),
    "a prompt of 3 MB": (PATHS[0], completion(prompt="a" * 3_000_000)),
    "logprobs": (PATHS[0], completion(logprobs=10**6)),
    "prompt_logprobs": (PATHS[0], completion(prompt_logprobs=10**6)),
    "top_logprobs": (PATHS[1], chat(logprobs=True, top_logprobs=21)),
    "1e5 stop strings": (PATHS[0], completion(stop=["a"] * 100_000)),
    "a stop string of 1 MB": (PATHS[0], completion(stop="a" * 1_000_000)),
    "1e5 stop ids": (PATHS[0], completion(stop_token_ids=[5] * 100_000)),
    "1e5 biases": (PATHS[0], completion(logit_bias={str(i): 1 for i in range(100_000)})),
    "1e5 bad words": (PATHS[0], completion(bad_words=["a"] * 100_000)),
    "1e5 allowed ids": (PATHS[0], completion(allowed_token_ids=list(range(100_000)))),
    "max_tokens": (PATHS[0], completion(max_tokens=TWO_63 - 1)),
    "max_tokens beyond 63 bits": (PATHS[0], completion(max_tokens=TWO_63)),
    "a number of 1e6 digits": (PATHS[0], completion(seed=0)[:-2] + b"9" * 10**6 + b"}"),
    "deep lists": (PATHS[0], b'{"model":"tiny","prompt":' + b"[" * 20_000 + b"]" * 20_000 + b"}"),
    "deep objects": (PATHS[0], b'{"a":' * 20_000 + b"1" + b"}" * 20_000),
    "20 MB": (PATHS[0], b" " * 20_000_000),
    "1e4 messages": (PATHS[1], chat(messages=CHAT["messages"] * 10_000)),  # type: ignore[operator]
    "1e5 parts": (PATHS[1], content(*[{"type": "text", "text": "a"}] * 80_000)),
    "1e5 parts of many messages": (
        PATHS[1],
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 800}] * 120),
    ),
    "a tool of 5e5 words": (
        PATHS[1],
        chat(
            tools=[
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"enum": ["a"] * 500_000}},
                }
            ]
        ),
    ),
    "2e5 fields": (PATHS[1], chat(**{f"x{i}": i for i in range(200_000)})),
    "a long salt": (PATHS[0], completion(cache_salt="a" * 10_000)),
    "a salt of NUL": (PATHS[0], completion(cache_salt="\0")),
    "1e5 choices": (PATHS[0], completion(structured_outputs={"choice": ["a" * 20] * 100_000})),
    "a chat template": (PATHS[1], chat(chat_template="{% for i in range(10**9) %}{% endfor %}")),
    "template arguments": (PATHS[1], chat(chat_template_kwargs={"tokenize": True})),
    "another template switch": (PATHS[1], chat(add_generation_prompt=False)),
}


@pytest.mark.parametrize("name", BOMBS)
async def test_a_bomb_is_refused_before_it_costs_anything(site: Site, name: str) -> None:
    path, body = BOMBS[name]
    rss_before, started_s = psutil.Process().memory_info().rss, time.process_time()
    bomb = asyncio.create_task(site.http.post(path, content=body))
    answers = [await site.http.post(PATHS[0], json=COMPLETION) for _ in range(3)]
    response = await bomb
    # Time of this process and not of the clock: tests stand beside others.
    assert time.process_time() - started_s < 1
    assert 400 <= response.status_code < 500, response.text
    assert len(response.content) < 2048
    assert psutil.Process().memory_info().rss - rss_before < 64 << 20
    assert [each.json()["choices"][0]["text"] for each in answers] == [ANSWER] * 3


@pytest.mark.parametrize(
    "head",
    [b"".join(b"x-%d: 1\r\n" % i for i in range(5000)), b"x-a: " + b"a" * 1_000_000 + b"\r\n"],
    ids=["5000 headers", "a header of 1 MB"],
)
async def test_a_head_that_is_a_bomb_is_refused(site: Site, head: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.ingress.http_port)
    started_s, answer = time.process_time(), b""
    with contextlib.suppress(ConnectionError):
        writer.write(
            b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + head + b"connection: close\r\n\r\n"
        )
        answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    assert time.process_time() - started_s < 1
    assert answer[9:12] in {b"400", b"431", b""}
    assert (await site.http.get("/v1/models")).status_code == 200


async def test_a_packed_grpc_message_is_not_unpacked_beyond_its_bound(site: Site) -> None:
    bomb = inference_pb2.GenerateRequest(
        generation=inference_pb2.Generation(model="tiny", text="\0" * (24 << 20))
    )
    rss_before = psutil.Process().memory_info().rss
    call = site.stub.Generate(bomb, compression=grpc.Compression.Gzip)
    assert await call.code() in {
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
    # Ours is the client, too: its own copies are in here.
    assert psutil.Process().memory_info().rss - rss_before < 256 << 20
    assert site.router.generations == []


# What only our own processes may say, and what others' servers once believed.
OTHERS_FIELDS = {
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank", "remote_host"),
    *("remote_port", "remote_block_ids", "remote_engine_id", "do_remote_prefill", "rid"),
    *("disagg_prefill_dp_rank", "prefill_url", "decode_url", "worker_url", "lora_path"),
}


def internal_fields() -> set[str]:
    messages = [
        message
        for file in (common_pb2, prefill_pb2, decode_pb2, state_pb2)
        for message in file.DESCRIPTOR.message_types_by_name.values()
    ]
    names = {field.name for message in messages for field in message.fields}
    public = {field.name for field in inference_pb2.Generation.DESCRIPTOR.fields}
    return (names - public - {"token_ids"}) | OTHERS_FIELDS


class Listener:
    """A port that nobody may call."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"

    def was_called(self) -> bool:
        try:
            self._socket.accept()[0].close()
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    opened = Listener()
    yield opened
    assert not opened.was_called()
    opened.close()


async def test_nobody_outside_sets_what_is_said_between_our_processes(
    site: Site, listener: Listener
) -> None:
    evil = listener.address
    names = sorted(internal_fields() - {"model", "prompt"})
    assert {"transfer_id", "prefill_worker", "epoch", "decode_worker"} <= set(names)
    for number, name in enumerate(names):
        value = (evil, 7777777, [evil], {"host": evil, "address": evil})[number % 4]
        path, body = ((PATHS[0], COMPLETION), (PATHS[1], CHAT))[number // 4 % 2]
        response = await site.http.post(path, json={name: value, **body})
        assert response.status_code in {200, 400}, (name, response.text)
        assert len(response.content) < 4096
    headers = {f"x-relevo-{name.replace('_', '-')}": evil for name in names[:50]}
    await site.http.post(PATHS[0], json=COMPLETION, headers=headers)
    unknown = inference_pb2.GenerateRequest(
        generation=inference_pb2.Generation(model="tiny", text="hi")
    ).SerializeToString()
    # Length-delimited fields 100 to 107, which no message of ours has.
    head = [bytes([0xA2 + 8 * number, 0x06, len(evil)]) for number in range(8)]
    forged = unknown + b"".join(each + evil.encode() for each in head)
    raw = site.channel.unary_unary("/relevo.v1.InferenceService/Generate")
    token = (("x-relevo-token", "guess"), ("x-relevo-request-id", evil))
    assert await raw(forged, metadata=token).code() is grpc.StatusCode.OK
    for generation in site.router.generations:
        told = repr(generation.request)
        assert evil not in told
        assert generation.request.request_id not in {evil, "7777777"}


@pytest.mark.parametrize(
    "url",
    [
        *("http://ADDRESS/a.png", "//ADDRESS/", "ftp://ADDRESS/", "file:///etc/passwd"),
        "data:image/png;base64," + "A" * 1_000_000,
    ],
    ids=lambda url: url[:24],
)
async def test_no_url_of_a_client_is_called(site: Site, listener: Listener, url: str) -> None:
    url = url.replace("ADDRESS", listener.address)
    for kind in ("image_url", "audio_url", "video_url", "input_audio", "file"):
        part = {"type": kind, kind: {"url": url}}
        response = await site.http.post(PATHS[1], content=content(part))
        assert response.status_code == 400
        assert len(response.content) < 1024
    assert site.router.generations == []


def broken(rng: random.Random) -> bytes:
    """A body that was right once."""
    body = bytearray(rng.choice([completion(temperature=1, stop=["a"]), chat(seed=5)]))
    for _ in range(rng.randint(1, 8)):
        place = rng.randrange(len(body))
        kind = rng.randrange(4)
        if kind == 0:
            body[place] = rng.randrange(256)
        elif kind == 1:
            del body[place : place + rng.randint(1, 20)]
        elif kind == 2:
            body[place:place] = rng.choice(
                [b'"', b"\\", b"{", b"[", b"null,", b"1e400", "🦊".encode(), b"x" * 2000]
            )
        else:
            body += body[:place]
        body = body or bytearray(b"{")
    return bytes(body)


async def test_broken_bodies_are_told_in_few_words(site: Site) -> None:
    rng, num_refused = random.Random(11), 0
    for _ in range(500):
        body = broken(rng)
        response = await site.inside.post(rng.choice(PATHS), content=body)
        assert response.status_code in {200, 400, 404}, body
        assert len(response.content) < 16 * 1024
        if response.status_code == 200:
            continue
        num_refused += 1
        error = orjson.loads(response.content)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert "Traceback" not in response.text
        assert ".py" not in response.text
        assert "x" * 257 not in response.text
    assert num_refused > 300


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    provider.set_up_tracing("test", TelemetryConfig())
    tracer_provider = trace.get_tracer_provider()
    assert isinstance(tracer_provider, TracerProvider)
    found = InMemorySpanExporter()
    tracer_provider.add_span_processor(SimpleSpanProcessor(found))
    return found


SECRET = "canary-4711"


async def test_neither_prompts_nor_keys_stand_in_logs_traces_or_metrics(
    locked_site: Site, exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    locked = locked_site
    headers = {"authorization": f"Bearer {KEY}", "x-secret": SECRET, "cookie": SECRET}
    bodies = [
        {**COMPLETION, "prompt": SECRET, "user": SECRET, "stop": [SECRET], "cache_salt": SECRET},
        {**COMPLETION, "prompt": SECRET, "stream": True, "metadata": {"a": SECRET}},
        {**COMPLETION, "prompt": SECRET, "temperature": 9},
        {**COMPLETION, "prompt": [SECRET]},
        {**COMPLETION, "prompt": SECRET, SECRET: SECRET, "session_id": SECRET},
    ]

    async def ask_all() -> None:
        for body in bodies:
            await locked.http.post(PATHS[0], json=body, headers=headers)
            await locked.http.post(
                PATHS[1],
                json={**CHAT, "messages": [{"role": "user", "content": SECRET, "name": SECRET}]},
                headers=headers,
            )
        others = {
            "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": SECRET}]},
            "/v1/responses": {"input": SECRET, "instructions": SECRET},
            "/tokenize": {"prompt": SECRET},
        }
        for path, body in others.items():
            await locked.http.post(path, json={"model": "tiny", **body}, headers=headers)
        generation = inference_pb2.Generation(model="tiny", text=SECRET, stop=[SECRET])
        call = locked.stub.Generate(
            inference_pb2.GenerateRequest(generation=generation),
            metadata=(("authorization", f"Bearer {KEY}"), ("x-secret", SECRET)),
        )
        await call.code()

    locked.router.script = saying(SECRET)
    await ask_all()
    for failure in (GenerationFailed("x"), RuntimeError("a bug")):
        locked.router.script = lambda _, failure=failure: [failure]
        await ask_all()
    wrong = {"authorization": f"Bearer {SECRET}"}
    assert (await locked.http.get("/v1/models", headers=wrong)).status_code == 401
    await locked.http.post(PATHS[0], content=SECRET.encode(), headers=headers)
    page = await locked.http.get("/metrics", headers=headers)
    spans = repr([(s.name, s.attributes, s.events, s.status.description) for s in _spans(exporter)])
    # The client of this test has its own loggers.
    records = [each for each in caplog.records if not each.name.startswith(("http", "openai"))]
    logged = "\n".join(record.getMessage() + str(record.exc_text) for record in records)
    assert "relevo" in page.text
    assert len(_spans(exporter)) > 20
    assert len(records) > 10
    for place in (page.text, spans, logged):
        assert SECRET not in place
        assert KEY not in place


def _spans(exporter: InMemorySpanExporter):  # type: ignore[no-untyped-def]
    return exporter.get_finished_spans()


def num_series(page: str) -> int:
    return sum(not line.startswith("#") for line in page.splitlines())


async def test_clients_make_no_new_metric_series(site: Site) -> None:
    async def ask(number: int) -> None:
        name = f"name-{number}"
        await site.http.get(f"/{name}")
        await site.http.get(f"/v1/models/{name}")
        await site.http.post(PATHS[0], json={**COMPLETION, "model": name})
        await site.http.post(
            PATHS[0], json={**COMPLETION, "user": name}, headers={"x-request-id": name}
        )

    await ask(0)
    before = num_series((await site.http.get("/metrics")).text)
    for number in range(1, 40):
        await ask(number)
    assert num_series((await site.http.get("/metrics")).text) == before
