"""Both faces tell the router whose request it is and which session it belongs to."""

import hashlib
from collections.abc import Awaitable, Callable

import pytest
from relevo.v1 import inference_pb2

from api.caller import Caller
from router.request import RoutedRequest, Tenant
from tests.integration.api.conftest import KEY, Site

TENANT = Tenant(name=hashlib.sha256(KEY.encode()).hexdigest()[:12])
AUTHORIZATION = ("authorization", f"Bearer {KEY}")


async def over_http(site: Site, session_id: str, prompt_cache_key: str) -> RoutedRequest:
    body = {"model": "tiny", "prompt": "hi", "prompt_cache_key": prompt_cache_key}
    headers = dict([AUTHORIZATION, ("x-session-id", session_id)])
    response = await site.http.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200
    assert "x-relevo-warnings" not in response.headers
    return site.router.generations[-1].request


async def over_grpc(site: Site, session_id: str, prompt_cache_key: str) -> RoutedRequest:
    generation = inference_pb2.Generation(model="tiny", text="hi")
    if prompt_cache_key:
        generation.prompt_cache_key = prompt_cache_key
    request = inference_pb2.GenerateRequest(generation=generation)
    metadata = (AUTHORIZATION, ("x-session-id", session_id))
    await site.stub.Generate(request, metadata=metadata)
    return site.router.generations[-1].request


@pytest.mark.parametrize("send", [over_http, over_grpc])
async def test_a_request_carries_its_tenant_and_its_session(
    locked_site: Site, send: Callable[[Site, str, str], Awaitable[RoutedRequest]]
) -> None:
    asked = [await send(locked_site, "chat-1", key) for key in ("", "book", "")]
    assert {request.tenant for request in asked} == {TENANT}
    caller = Caller(tenant=TENANT, session_id="chat-1")
    expected = [caller.session_key(key) for key in ("", "book", "")]
    assert [request.session_key for request in asked] == expected


async def test_without_keys_all_are_one_tenant(site: Site) -> None:
    request = await over_http(site, "", "")
    assert (request.tenant, request.session_key) == (Tenant(), "")
