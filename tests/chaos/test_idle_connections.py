"""Connections that lie idle, and one that is anything but."""

import asyncio
import struct

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.chaos.cluster import LiveCluster
from tests.chaos.conftest import SOAK_MINUTES

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="package"),
]

IDLE_S = (4.0, 6.0, 30.0, 76.0) if SOAK_MINUTES else (4.0, 6.0)
BODY = {"model": "tiny", "prompt": "Say hello", "max_tokens": 2}

# HTTP/2 by hand, since no client library lets one misbehave.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 0x4, 0x6, 0x7
PING_FRAME = struct.pack(">BHBBI", 0, 8, PING, 0, 0) + bytes(8)


async def test_an_idle_connection_is_used_again_without_a_reset(cluster: LiveCluster) -> None:
    async def use(idle_s: float) -> None:
        limits = httpx.Limits(max_connections=1, keepalive_expiry=300.0)
        async with httpx.AsyncClient(base_url=cluster.served.url, limits=limits) as http:
            for pause_s in (0.0, idle_s, 0.0):
                await asyncio.sleep(pause_s)
                # No retry below: a reset would be raised here.
                response = await http.post("/v1/completions", json=BODY, timeout=30.0)
                assert response.is_success

    async def call(idle_s: float) -> None:
        address = f"127.0.0.1:{cluster.served.grpc_port}"
        async with grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for pause_s in (0.0, idle_s, 0.0):
                await asyncio.sleep(pause_s)
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=30.0)

    await asyncio.gather(*(ask(idle_s) for ask in (use, call) for idle_s in IDLE_S))


async def test_a_flood_of_pings_is_sent_away_and_costs_others_nothing(cluster: LiveCluster) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.served.grpc_port)
    writer.write(PREFACE + struct.pack(">BHBBI", 0, 0, SETTINGS, 0, 0) + PING_FRAME * 50)
    kind = SETTINGS
    try:
        async with asyncio.timeout(30.0):
            while kind != GOAWAY:
                high, low, kind, _, _ = struct.unpack(">BHBBI", await reader.readexactly(9))
                await reader.readexactly(high << 16 | low)
    finally:
        writer.close()
    response = await cluster.http.post("/v1/completions", json=BODY)
    assert response.is_success, response.text
