"""What one tenant may do to another: nothing. What a key may use up: its quota."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status
from relevo.v1 import inference_pb2

from api.tokenizer import Tokenizer
from tests.integration.api.conftest import Site, open_site, saying

COMPLETION = {"model": "tiny", "prompt": "hi"}


def line(key: str, rest: str) -> str:
    return f"{hashlib.sha256(key.encode()).hexdigest()} {rest}\n"


def http_key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def grpc_key(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


@pytest.fixture
async def site(model_path: Path, tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Site]:
    keys = tmp_path / "keys"
    keys.write_text(
        line("alice", "alice")
        + line("bob", "bob")
        + line("boss", "boss role=operator")
        + line("few", "few requests_per_minute=2")
        + line("short", "short tokens_per_minute=10")
    )
    async with open_site(
        model_path, tokenizer, api_keys_file=str(keys), tenant_cache_salt=True
    ) as opened:
        yield opened


async def test_a_spent_request_quota_is_429_on_both_faces(site: Site) -> None:
    assert (await site.http.get("/v1/models", headers=http_key("few"))).status_code == 200
    await site.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=grpc_key("few"))
    refused = await site.http.get("/v1/models", headers=http_key("few"))
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await site.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=grpc_key("few"))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status = rpc_status.from_call(caught.value)
    retry = error_details_pb2.RetryInfo()
    assert any(each.Unpack(retry) for each in status.details)
    assert 0 < retry.retry_delay.ToMilliseconds() <= 30_000
    for path in ("/health", "/ready"):
        assert (await site.http.get(path, headers=http_key("few"))).status_code == 200
    assert (await site.http.get("/v1/models", headers=http_key("alice"))).status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
async def test_prompts_and_completions_use_up_the_token_quota(site: Site, is_stream: bool) -> None:
    body = {**COMPLETION, "stream": is_stream}
    first = await site.http.post("/v1/completions", json=body, headers=http_key("short"))
    assert first.status_code == 200
    second = await site.http.post("/v1/completions", json=body, headers=http_key("short"))
    assert second.status_code == 429
    assert "tokens_per_minute" in second.json()["error"]["message"]
    assert len(site.router.generations) == 1


async def test_a_tenant_cannot_end_another_s_request(site: Site) -> None:
    site.router.script = saying("ab", end=None)
    generation = inference_pb2.Generation(model="tiny", text="hi")
    call = site.stub.GenerateStream(
        inference_pb2.GenerateStreamRequest(generation=generation), metadata=grpc_key("alice")
    )
    first = await call.read()
    abort = inference_pb2.AbortRequest(request_id=first.request_id)
    assert not (await site.stub.Abort(abort, metadata=grpc_key("bob"))).aborted
    assert not site.router.generations[0].is_closed
    assert (await site.stub.Abort(abort, metadata=grpc_key("alice"))).aborted
    await asyncio.wait_for(site.router.generations[0].closed.wait(), 30)


async def test_no_tenant_can_name_the_salt_of_another(site: Site) -> None:
    for key in ("alice", "bob"):
        for fields in ({}, {"cache_salt": "s"}, {"cache_salt": "alice\tx"}):
            body = {**COMPLETION, **fields}
            await site.http.post("/v1/completions", json=body, headers=http_key(key))
        generation = inference_pb2.Generation(model="tiny", text="hi", cache_salt="s")
        await site.stub.Generate(
            inference_pb2.GenerateRequest(generation=generation), metadata=grpc_key(key)
        )
    salts = [each.request.cache_salt for each in site.router.generations]
    alice, bob = salts[:4], salts[4:]
    assert alice[1] == alice[3]
    assert len({*alice, *bob}) == 6
    # What the first tenant got, sent back by the second, opens nothing.
    body = {**COMPLETION, "cache_salt": alice[1]}
    await site.http.post("/v1/completions", json=body, headers=http_key("bob"))
    assert site.router.generations[-1].request.cache_salt not in alice


async def test_two_tenants_with_one_label_and_session_share_nothing(site: Site) -> None:
    shared = {"x-request-id": "same", "x-session-id": "same"}
    for key in ("alice", "bob"):
        await site.http.post("/v1/completions", json=COMPLETION, headers=http_key(key) | shared)
    one, other = (each.request for each in site.router.generations)
    assert one.request_id != other.request_id
    assert one.session_key != other.session_key


async def test_a_tenant_sees_its_own_requests_and_an_operator_all(site: Site) -> None:
    shared = {"x-request-id": "same"}
    ids = {}
    for key in ("alice", "bob"):
        done = await site.http.post(
            "/v1/completions", json=COMPLETION, headers=http_key(key) | shared
        )
        ids[key] = done.json()["id"]
    for name in (ids["alice"], "same"):
        seen = await site.http.get(f"/v1/traces/{name}", headers=http_key("alice"))
        assert seen.json()["request_id"] == ids["alice"].removeprefix("cmpl-")
    hidden = await site.http.get(f"/v1/traces/{ids['bob']}", headers=http_key("alice"))
    missing = await site.http.get(f"/v1/traces/{ids['bob'][:-1]}x", headers=http_key("alice"))
    assert hidden.status_code == missing.status_code == 404
    for key in ("alice", "bob"):
        seen = await site.http.get(f"/v1/traces/{ids[key]}", headers=http_key("boss"))
        assert seen.status_code == 200


async def test_a_refused_request_is_found_by_its_own_tenant(site: Site) -> None:
    body = {**COMPLETION, "max_tokens": -1}
    headers = http_key("alice") | {"x-request-id": "refused"}
    refused = await site.http.post("/v1/completions", json=body, headers=headers)
    assert refused.status_code == 400
    seen = await site.http.get("/v1/traces/refused", headers=http_key("alice"))
    (span,) = seen.json()["spans"]
    assert span["attributes"]["error.type"] == "invalid_value"
    other = await site.http.get("/v1/traces/refused", headers=http_key("bob"))
    assert other.status_code == 404


async def test_what_speaks_of_all_tenants_needs_an_operator(site: Site) -> None:
    site.router.reasons = ["decode-1 is lost"]
    site.router.workers = [{"id": "decode-0", "pool": "decode", "state": "ready", "links": []}]
    for path in ("/dashboard", "/metrics", "/v1/loads"):
        refused = await site.http.get(path, headers=http_key("alice"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operators_only")
        assert "role=operator" in refused.json()["error"]["message"]
        assert (await site.http.get(path, headers=http_key("boss"))).status_code == 200
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await site.stub.GetLoad(inference_pb2.GetLoadRequest(), metadata=grpc_key("alice"))
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    loads = await site.stub.GetLoad(inference_pb2.GetLoadRequest(), metadata=grpc_key("boss"))
    assert loads.workers
    status = await site.http.get("/v1/status?routes=1", headers=http_key("alice"))
    own_routes = [{"number": 0, "of": "alice"}]
    assert status.json() == {"state": "ready", "reasons": [], "workers": [], "routes": own_routes}
    status = await site.http.get("/v1/status?routes=1", headers=http_key("boss"))
    assert status.json()["workers"] == site.router.workers
    assert status.json()["routes"] == [{"number": 0, "of": None}]


async def test_a_key_taken_out_of_the_file_closes_the_door(site: Site, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(line("alice", "alice"))
    headers = http_key("bob")
    async with asyncio.timeout(30):
        while (await site.http.get("/v1/models", headers=headers)).is_success:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert (await site.http.get("/v1/models", headers=headers)).status_code == 401
    assert (await site.http.get("/v1/models", headers=http_key("alice"))).status_code == 200
