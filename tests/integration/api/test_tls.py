"""TLS on both public ports, and mutual TLS where a client CA is named."""

import asyncio
import ssl
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from api.config import TlsConfig
from api.tokenizer import Tokenizer
from cluster.http_client import FrontError, get_json, open_client
from tests.certificates import make_certificate
from tests.integration.api.conftest import open_site

NAME = "relevo.test"


def files(folder: Path, name: str) -> tuple[str, str]:
    made = make_certificate(folder, name)
    return made.certificate_file, made.private_key_file


def read(path: str) -> bytes:
    return Path(path).read_bytes()


async def http_status(port: int, ca: str, client: tuple[str, str] | None = None) -> int:
    context = ssl.create_default_context(cafile=ca)
    if client is not None:
        context.load_cert_chain(*client)
    async with httpx.AsyncClient(verify=context) as http:
        url = f"https://127.0.0.1:{port}/health"
        extensions = {"sni_hostname": NAME}
        return (await http.get(url, extensions=extensions)).status_code


async def grpc_status(port: int, ca: str, client: tuple[str, str] | None = None) -> int:
    chain, key = (None, None) if client is None else map(read, client)
    credentials = grpc.ssl_channel_credentials(read(ca), key, chain)
    options = [("grpc.ssl_target_name_override", NAME)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest(), timeout=30)).status)


async def test_tls_is_spoken_on_both_ports_and_nothing_else(
    model_path: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    certificate, key = files(tmp_path / "server", NAME)
    tls = TlsConfig(certificate_file=certificate, private_key_file=key)
    async with open_site(model_path, tokenizer, tls=tls) as site:
        assert await http_status(site.ingress.http_port, certificate) == 200
        assert await grpc_status(site.ingress.grpc_port, certificate) == 1
        with pytest.raises(httpx.TransportError):
            await site.http.get("/health")  # plain text
        plain = health_pb2_grpc.HealthStub(site.channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await plain.Check(health_pb2.HealthCheckRequest(), timeout=30)


async def test_mutual_tls_lets_in_only_who_shows_a_certificate_of_the_ca(
    model_path: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    certificate, key = files(tmp_path / "server", NAME)
    friend = files(tmp_path / "friend", "friend")
    stranger = files(tmp_path / "stranger", "stranger")
    tls = TlsConfig(certificate_file=certificate, private_key_file=key, client_ca_file=friend[0])
    async with open_site(model_path, tokenizer, tls=tls) as site:
        assert await http_status(site.ingress.http_port, certificate, friend) == 200
        assert await grpc_status(site.ingress.grpc_port, certificate, friend) == 1
        for client in (None, stranger):
            with pytest.raises((httpx.TransportError, ssl.SSLError)):
                await http_status(site.ingress.http_port, certificate, client)
            with pytest.raises(grpc.aio.AioRpcError):
                await grpc_status(site.ingress.grpc_port, certificate, client)


async def test_our_own_commands_trust_a_ca_that_is_named(
    model_path: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = files(tmp_path / "server", "localhost")
    tls = TlsConfig(certificate_file=certificate, private_key_file=key)
    async with open_site(model_path, tokenizer, tls=tls) as site:
        url = f"https://localhost:{site.ingress.http_port}"

        def ask() -> object:
            with open_client(url, api_key="") as client:
                return get_json(client, "/ready")

        with pytest.raises(FrontError, match="certificate verify failed"):
            await asyncio.to_thread(ask)
        monkeypatch.setenv("SSL_CERT_FILE", certificate)
        assert await asyncio.to_thread(ask) == {"status": "ready"}


def test_half_a_configuration_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tls\.private_key_file"):
        TlsConfig(certificate_file="a", private_key_file="")
