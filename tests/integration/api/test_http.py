"""Raw HTTP: shapes of streams, bounds, labels, disconnects."""

import asyncio
import ipaddress
import json
import time
from email.utils import parsedate_to_datetime

import orjson
import psutil
import pytest

from router.request import FinishReason, TokenBatch
from tests.integration.api.conftest import ANSWER, Site, open_site, saying, tokens_of
from tests.patience import comes_true

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "tiny", "prompt": "hi"}


def events(text: str) -> list[str]:
    parts = text.split("\n\n")
    assert parts[-1] == ""
    assert all(part.startswith("data: ") for part in parts[:-1])
    return [part.removeprefix("data: ") for part in parts[:-1]]


async def test_a_stream_has_openai_s_shape(site: Site) -> None:
    response = await site.http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *data, done = events(response.text)
    assert done == "[DONE]"
    chunks = [json.loads(each) for each in data]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [
        *[None] * (len(chunks) - 1),
        "stop",
    ]
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_stands_in_one_extra_chunk(site: Site) -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    *data, _ = events((await site.http.post("/v1/chat/completions", json=body)).text)
    chunks = [json.loads(each) for each in data]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    whole = (await site.http.post("/v1/chat/completions", json=CHAT)).json()
    assert chunks[-1]["usage"] == whole["usage"]


async def test_odd_line_separators_are_escaped(site: Site) -> None:
    text = "a\u0085b\u2028c\u2029d\re\nf"
    site.router.script = saying(text)
    response = await site.http.post("/v1/completions", json={**COMPLETION, "stream": True})
    assert not any(mark in response.text for mark in "\u0085\u2028\u2029\r")
    *data, _ = events(response.text)
    assert "".join(json.loads(each)["choices"][0]["text"] for each in data) == text


async def test_an_error_in_a_stream_ends_it_without_done(site: Site) -> None:
    site.router.script = lambda request: [*saying("ab", end=None)(request), RuntimeError("x")]
    response = await site.http.post("/v1/completions", json={**COMPLETION, "stream": True})
    data = events(response.text)
    error = json.loads(data[-1])["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "[DONE]" not in data


async def test_the_client_s_label_comes_back_and_the_id_is_ours(site: Site) -> None:
    headers = {"x-request-id": "my-label"}
    first = await site.http.post("/v1/completions", json=COMPLETION, headers=headers)
    second = await site.http.post("/v1/completions", json=COMPLETION, headers=headers)
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "my-label"
    assert first.json()["id"] != second.json()["id"]
    assert {each.request.request_label for each in site.router.generations} == {"my-label"}
    assert len({each.request.request_id for each in site.router.generations}) == 2


@pytest.mark.parametrize("label", ["", "x" * 129, "ž"])
async def test_an_unusable_label_is_replaced(site: Site, label: str) -> None:
    response = await site.http.get("/health", headers={"x-request-id": label.encode()})  # type: ignore[dict-item]
    assert len(response.headers["x-request-id"]) == 32


async def test_server_timing_tells_the_parts(site: Site) -> None:
    for stream in (False, True):
        body = {**COMPLETION, "stream": stream}
        response = await site.http.post("/v1/completions", json=body)
        assert "prefill;dur=35.4" in response.headers["server-timing"]


async def test_unknown_fields_are_named_in_a_header(site: Site) -> None:
    for stream in (False, True):
        body = {**COMPLETION, "bootstrap_host": "127.0.0.1", "stream": stream}
        response = await site.http.post("/v1/completions", json=body)
        assert response.status_code == 200
        assert "bootstrap_host" in response.headers["x-relevo-warnings"]


async def test_unknown_fields_are_errors_when_strict(model_path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    async with open_site(model_path, tokenizer, strict=True) as site:
        response = await site.http.post("/v1/completions", json={**COMPLETION, "nonsense": 1})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "nonsense"


BAD_BODIES = [
    b"",
    b"[]",
    b"null",
    b"{",
    b'{"model": "tiny", "prompt": "\xff"}',
    "你好".encode("gbk"),
    b"\xef\xbb\xbf{}",
    b'{"model": "tiny", "prompt": NaN}',
    b'{"model": "tiny", "prompt": "a", "temperature": 1e999}',
    b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 1_000_000 + b"}",
    b'{"model": "tiny", "prompt": "a", "x": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    b'{"model": "tiny", "prompt": ' + b"[" * 20_000,
    b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    b'{"model": "tiny", "prompt": []}',
    b'{"model": "tiny", "prompt": [[]]}',
    b'{"model": "tiny", "prompt": [true]}',
    b'{"model": "tiny", "prompt": ["a", 1]}',
    b'{"model": "tiny", "prompt": [1, "a"]}',
    b'{"model": "tiny", "prompt": [-1]}',
    b'{"model": "tiny", "prompt": [9223372036854775808]}',
    b'{"model": "tiny", "prompt": [99999]}',
    b'{"model": "tiny", "prompt": ""}',
    b'{"model": "tiny", "prompt": ["", "a"]}',
    b'{"model": "tiny"}',
    b'{"prompt": "a"}',
    orjson.dumps({"model": "tiny", "prompt": ["a"] * 100_000}),
    orjson.dumps({"model": "tiny", "prompt": "a" * 500_000}),
    orjson.dumps({"model": "tiny", "prompt": "a", "stop": ["a"] * 100_000}),
    orjson.dumps({"model": "tiny", "prompt": "a", "stop": "a" * 1_000_000}),
    orjson.dumps({"model": "tiny", "prompt": "a", "logit_bias": {str(i): 1 for i in range(10**5)}}),
]


@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda body: repr(body[:40]))
@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_body_is_a_short_400_at_once(site: Site, body: bytes, stream: bool) -> None:
    if stream and body.startswith(b'{"model"'):
        body = b'{"stream": true, ' + body[1:]
    started_s = time.process_time()
    response = await site.http.post("/v1/completions", content=body)
    assert time.process_time() - started_s < 1
    assert response.status_code == 400
    assert len(response.content) < 2048
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    assert site.router.generations == []


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        [1],
        [{"role": "wizard", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": "a"}, {"role": "system", "content": "late"}],
        [{"role": "user", "content": "x" * 500_000}],
        [{"role": "user", "content": "x"}] * 10_000,
        [[]] * 10,
    ],
    ids=lambda messages: repr(messages)[:50],
)
async def test_a_bad_chat_is_a_400(site: Site, messages: object) -> None:
    body = {"model": "tiny", "messages": messages}
    response = await site.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert len(response.content) < 2048


async def test_the_template_s_reason_reaches_the_client(site: Site) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "late"}]
    body = {"model": "tiny", "messages": messages}
    response = await site.http.post("/v1/chat/completions", json=body)
    assert "a system message must come first" in response.json()["error"]["message"]


async def test_too_long_a_request_is_the_same_400_in_both_modes(site: Site) -> None:
    bodies = [
        (await site.http.post("/v1/completions", json={**COMPLETION, **extra})).json()["error"]
        for extra in ({"max_tokens": 300}, {"max_tokens": 300, "stream": True})
    ]
    assert bodies[0] == bodies[1]
    assert bodies[0]["code"] == "context_length_exceeded"
    assert "256" in bodies[0]["message"]


async def test_bounds_of_body_and_head(site: Site) -> None:
    big = await site.http.post("/v1/completions", content=b" " * (5 * 1024 * 1024))
    assert big.status_code == 413

    async def chunks():  # type: ignore[no-untyped-def]
        for _ in range(80):
            yield b" " * 65536

    assert (await site.http.post("/v1/completions", content=chunks())).status_code == 413
    many = {f"x-{number}": "1" for number in range(100)}
    assert (await site.http.get("/health", headers=many)).status_code == 431
    assert (await site.http.get("/health", headers={"x-a": "1" * 40_000})).status_code == 431
    assert (await site.http.get("/health")).status_code == 200


async def test_a_head_without_end_loses_its_connection(site: Site) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.ingress.http_port)
    writer.write(b"GET /health HTTP/1.1\r\nx-a: ")
    answer = b""
    try:
        for _ in range(64):
            writer.write(b"1" * 65536)
            await writer.drain()
            await asyncio.sleep(0)
        answer = await asyncio.wait_for(reader.read(), 30)
    except ConnectionError:
        pass
    writer.close()
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    assert (await site.http.get("/health")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["", "ab"], ids=["before", "after the first token"])
async def test_a_disconnect_closes_the_generation_at_once(
    site: Site, stream: bool, text: str
) -> None:
    site.router.script = saying(text, end=None)
    body = orjson.dumps({**COMPLETION, "stream": stream})
    _, writer = await asyncio.open_connection("127.0.0.1", site.ingress.http_port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    async with asyncio.timeout(30):
        await site.router.started.wait()
        await asyncio.sleep(0.05)
        assert not site.router.generations[0].is_closed
        writer.close()
        await site.router.generations[0].closed.wait()
    assert await comes_true(lambda: site.ingress.serving.num_running == 0, 5.0)


async def test_eight_streams_stay_pure(site: Site) -> None:
    site.router.script = lambda request: saying(request.request_label * 9)(request)
    site.router.step_s = 0.001

    async def one(letter: str) -> str:
        response = await site.http.post(
            "/v1/completions",
            json={**COMPLETION, "stream": True},
            headers={"x-request-id": letter},
        )
        *data, _ = events(response.text)
        return "".join(json.loads(each)["choices"][0]["text"] for each in data)

    assert await asyncio.gather(*map(one, "abcdefgh")) == [letter * 9 for letter in "abcdefgh"]


async def test_keep_alive_comments_come_in_a_quiet_stream(model_path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    async with open_site(model_path, tokenizer, keep_alive_s=0.05) as site:
        site.router.step_s = 0.2
        site.router.script = saying("a")
        response = await site.http.post("/v1/completions", json={**COMPLETION, "stream": True})
        assert ": keep-alive\n\n" in response.text
        assert response.text.endswith("data: [DONE]\n\n")


async def test_an_answer_is_dated(site: Site) -> None:
    date = parsedate_to_datetime((await site.http.get("/health")).headers["date"])
    assert abs(date.timestamp() - time.time()) < 30


async def test_readiness_follows_the_router(site: Site) -> None:
    assert (await site.http.get("/ready")).status_code == 200
    site.router.ready = False
    response = await site.http.get("/ready")
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert (await site.http.get("/health")).status_code == 200


async def test_before_any_worker_all_is_503_but_the_models(site: Site) -> None:
    site.router.model = None
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        response = await site.http.post(path, json=body)
        assert response.status_code == 503
        assert response.headers["retry-after"]
    assert (await site.http.get("/v1/models")).json()["data"][0]["max_model_len"] is None


async def test_tokenize_and_detokenize_are_inverse(site: Site) -> None:
    answer = (await site.http.post("/tokenize", json={"prompt": ANSWER})).json()
    assert answer == {
        "count": len(tokens_of(ANSWER)),
        "max_model_len": 256,
        "tokens": tokens_of(ANSWER),
    }
    back = await site.http.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": ANSWER}
    chat = (await site.http.post("/tokenize", json={"messages": CHAT["messages"]})).json()
    assert chat["tokens"] == tokens_of("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("tokens", [None, [99999], [-1], ["a"], [1] * 300, "x"], ids=repr)
async def test_bad_ids_are_not_detokenized(site: Site, tokens: object) -> None:
    assert (await site.http.post("/detokenize", json={"tokens": tokens})).status_code == 400


async def test_views(site: Site) -> None:
    assert (await site.http.get("/v1/status")).json()["state"] == "ready"
    assert len((await site.http.get("/v1/status?routes=3")).json()["routes"]) == 3
    assert (await site.http.get("/v1/status?routes=x")).status_code == 400
    load = (await site.http.get("/v1/loads")).json()["workers"][0]
    assert (load["worker_id"], load["blocks"]["free"]) == ("decode-0", 10)
    metrics = (await site.http.get("/metrics")).text
    assert 'relevo_requests_running{pool="decode",worker="decode-0"} 3.0' in metrics or (
        'relevo_requests_running{worker="decode-0",pool="decode"} 3.0' in metrics
    )
    page = (await site.http.get("/docs")).text
    assert "http://" not in page
    assert "https://" not in page
    paths = (await site.http.get("/openapi.json")).json()["paths"]
    assert {path.replace("{model}", "{model:path}") for path in paths} == set(site.ingress.routes)


async def test_unknown_routes_and_methods_have_openai_s_error(site: Site) -> None:
    for method, path, status in (
        ("GET", "/nope", 404),
        ("GET", "//v1/models", 404),
        ("GET", "/v1/models/", 404),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/completions", 405),
    ):
        response = await site.http.request(method, path)
        assert response.status_code == status, path
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}


async def test_a_taken_port_is_an_error(site: Site, model_path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(OSError, match="in use"):
        async with open_site(model_path, tokenizer, http_port=site.ingress.http_port):
            pass
    with pytest.raises(OSError, match="for gRPC"):
        async with open_site(model_path, tokenizer, grpc_port=site.ingress.grpc_port):
            pass


async def test_only_loopback_is_listened_on(site: Site) -> None:
    ports = {site.ingress.http_port, site.ingress.grpc_port}
    listeners = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port in ports
    }
    assert len(listeners) >= 1
    assert all(ipaddress.ip_address(each.removeprefix("::ffff:")).is_loopback for each in listeners)


async def test_stopping_ends_what_still_runs(model_path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    async with open_site(model_path, tokenizer) as site:
        site.router.script = saying("ab", end=None)
        running = asyncio.create_task(
            site.http.post("/v1/completions", json={**COMPLETION, "stream": True})
        )
        await site.router.started.wait()
        await site.ingress.stop()
        assert site.router.generations[0].is_closed
        assert "error" in events((await running).text)[-1]


async def test_min_tokens_lets_early_stop_strings_pass(site: Site) -> None:
    site.router.script = lambda _: (
        [TokenBatch(tokens_of("\n") * 4) for _ in range(4)] + [TokenBatch([], FinishReason.LENGTH)]
    )
    body = {**COMPLETION, "stop": ["\n"], "min_tokens": 8, "max_tokens": 16}
    answer = (await site.http.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["text"] == "\n" * 8
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 9


async def test_a_stranger_s_text_is_not_echoed(site: Site) -> None:
    for name in ("model", "prompt", "stop", "temperature", "user", "x" * 5000):
        body = {**COMPLETION, name: {"canary" * 1000: 1} if name == "user" else "canary" * 1000}
        response = await site.http.post("/v1/completions", json=body)
        assert "canary" * 43 not in response.text
        assert response.status_code < 500


async def test_no_answer_waits_for_a_delayed_acknowledgement(site: Site) -> None:
    times: list[float] = []
    for _ in range(12):
        started = time.monotonic()
        assert (await site.http.get("/health")).status_code == 200
        times.append(time.monotonic() - started)
    assert min(times) < 0.03


async def test_a_priority_reaches_the_router(site: Site) -> None:
    for priority in (None, 0, 5, -5):
        await site.http.post("/v1/completions", json={**COMPLETION, "priority": priority})
    assert [each.request.priority for each in site.router.generations] == [0, 0, 5, -5]


async def test_a_whole_answer_is_gathered_and_a_stream_is_not(site: Site) -> None:
    for is_stream in (False, True):
        await site.inside.post("/v1/completions", json={**COMPLETION, "stream": is_stream})
    whole, stream = site.router.generations
    assert whole.num_gathered > stream.num_gathered == 1
