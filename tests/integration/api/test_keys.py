"""With keys set, no HTTP route answers without one but the two probes."""

import asyncio

import pytest

from tests.integration.api.conftest import KEY, Site

OPEN = {"/health", "/ready"}
BAD_HEADERS: list[list[tuple[str, str]]] = [
    [],
    [("authorization", "Bearer sk-wrong")],
    [("authorization", "Bearer sk-righ")],
    [("authorization", "Bearer")],
    [("authorization", f"bearer {KEY}")],
    [("authorization", KEY)],
    [("authorization", f"Basic {KEY}")],
    [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")],
    [("x-api-key", KEY)],
]


@pytest.mark.parametrize("headers", BAD_HEADERS, ids=repr)
async def test_every_route_wants_a_key(locked_site: Site, headers: list[tuple[str, str]]) -> None:
    for path in locked_site.ingress.routes:
        if path.startswith("/v1/messages") and headers[:1] == [("x-api-key", KEY)]:
            continue  # the one API whose clients send it so
        for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT"):
            response = await locked_site.inside.request(method, path, headers=headers)
            assert (response.status_code == 401) != (path in OPEN), (method, path)


async def raw_status(site: Site, path: str) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.ingress.http_port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return int(answer.split(b" ")[1])


@pytest.mark.parametrize(
    "path",
    [
        "//v1/models",
        "/v1/../v1/models",
        "/health/../v1/models",
        "/%2e/v1/models",
        "/v1/models/",
        "/health/",
        "//health",
        "/health%2f..%2fv1/models",
        "/V1/models",
        "/nope",
    ],
)
async def test_no_spelling_of_a_path_goes_round_the_gate(locked_site: Site, path: str) -> None:
    assert await raw_status(locked_site, path) == 401


async def test_the_right_key_opens_and_is_told_nowhere(locked_site: Site) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    response = await locked_site.http.get("/v1/models", headers=headers)
    assert response.status_code == 200
    assert KEY not in response.text + repr(response.headers)
    refused = await locked_site.http.get("/v1/models")
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert refused.headers["www-authenticate"] == "Bearer"
    assert [model.id async for model in locked_site.openai.models.list()] == ["tiny"]
