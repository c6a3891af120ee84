"""A killed peer is noticed at once, by running calls and by new ones."""

import asyncio
import sys
import time

import grpc
import pytest
from relevo.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

from rpc import errors
from rpc.channel import ChannelPool
from rpc.config import RpcConfig
from rpc.status import from_rpc_error
from tests.integration.rpc.conftest import TOKEN, read_to_the_end

# Far below the minute and more after which a channel notices that nobody is there.
AT_ONCE_S = 10.0


@pytest.fixture
async def peer():
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.integration.rpc.dying_worker",
        stdout=asyncio.subprocess.PIPE,
        env={"PYTHONPATH": ".:protos", "PATH": ""},
    )
    address = (await asyncio.wait_for(process.stdout.readline(), 50)).decode().strip()
    yield process, address
    if process.returncode is None:
        process.kill()
    await process.wait()


async def test_a_killed_peer_ends_its_streams_and_refuses_new_calls_at_once(peer):
    process, address = peer
    pool = ChannelPool(token=TOKEN, config=RpcConfig())
    channel = pool.get(address)
    stream = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(prefill_pb2.PrefillRequest())
    await stream.read()
    process.kill()
    started_at_s = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as running:
        await read_to_the_end(stream)
    with pytest.raises(grpc.aio.AioRpcError) as new:
        await decode_pb2_grpc.DecodeServiceStub(channel).SetPeers(decode_pb2.SetPeersRequest())
    assert time.monotonic() - started_at_s < AT_ONCE_S
    for failure in (running, new):
        assert type(from_rpc_error(failure.value)) is errors.WorkerUnavailableError
    await pool.close()


async def test_an_address_where_nobody_listens_fails_at_once():
    pool = ChannelPool(token=TOKEN, config=RpcConfig())
    stub = decode_pb2_grpc.DecodeServiceStub(pool.get("127.0.0.1:1"))
    started_at_s = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stub.SetPeers(decode_pb2.SetPeersRequest())
    assert time.monotonic() - started_at_s < AT_ONCE_S
    assert type(from_rpc_error(failure.value)) is errors.WorkerUnavailableError
    await pool.close()
