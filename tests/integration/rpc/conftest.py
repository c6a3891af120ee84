"""A worker's server on loopback, with services of all four call kinds."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from relevo.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    state_pb2_grpc,
)

from rpc.channel import ChannelPool
from rpc.config import RpcConfig
from rpc.server import WorkerServer
from rpc.worker_service import WorkerService

TOKEN = "the-secret-of-this-cluster"


class EchoPrefill(prefill_pb2_grpc.PrefillServiceServicer):
    """Streams both ways, and server streams in both styles of grpc.aio."""

    def __init__(self):
        self.closed = asyncio.Event()

    async def OpenLink(self, request_iterator, context):  # noqa: N802
        async for request in request_iterator:
            yield prefill_pb2.OpenLinkResponse(store_entry=request.store_entry)

    async def Prefill(self, request, context):  # noqa: N802
        try:
            while True:
                yield prefill_pb2.PrefillResponse(tokens=common_pb2.Tokens(token_ids=[7]))
                await asyncio.sleep(0.01)
        finally:
            self.closed.set()

    async def Transfer(self, request, context):  # noqa: N802
        for number in range(3):
            await context.write(
                prefill_pb2.TransferResponse(
                    offer=prefill_pb2.TransferResponse.Offer(num_tokens=number)
                )
            )


class EchoDecode(decode_pb2_grpc.DecodeServiceServicer):
    """A unary call and a stream, each doing what the test sets."""

    def __init__(self):
        self.on_call = lambda: None

    async def SetPeers(self, request, context):  # noqa: N802
        self.on_call()
        return decode_pb2.SetPeersResponse()

    async def Decode(self, request, context) -> AsyncIterator[decode_pb2.DecodeResponse]:  # noqa: N802
        yield decode_pb2.DecodeResponse(num_cached_tokens=1)
        self.on_call()
        yield decode_pb2.DecodeResponse(num_cached_tokens=2)


async def _total(request_iterator, context):
    return str(sum([int(each) async for each in request_iterator])).encode()


CLIENT_STREAM = grpc.method_handlers_generic_handler(
    "test.Sums", {"Total": grpc.stream_unary_rpc_method_handler(_total)}
)


class Served:
    """A running server with its services and channels to it."""

    def __init__(self, feed=None, config=None, bind_host="127.0.0.1"):
        self.prefill, self.decode, self.feed = EchoPrefill(), EchoDecode(), feed
        self.config = config or RpcConfig()
        self.server = WorkerServer(bind_host=bind_host, config=self.config, token=TOKEN)
        self.pool = ChannelPool(token=TOKEN, config=self.config)
        self.address = ""

    async def start(self):
        self.address = await self.server.start(self._add_servicers)
        return self

    def _add_servicers(self, server):
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self.prefill, server)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self.decode, server)
        server.add_generic_rpc_handlers((CLIENT_STREAM,))
        if self.feed is not None:
            state_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerService(self.feed), server)

    @property
    def channel(self):
        return self.pool.get(self.address)

    @property
    def prefill_stub(self):
        return prefill_pb2_grpc.PrefillServiceStub(self.channel)

    @property
    def decode_stub(self):
        return decode_pb2_grpc.DecodeServiceStub(self.channel)

    async def stop(self):
        await self.pool.close()
        await self.server.stop(0)


async def read_to_the_end(call):
    """Read what there is left of a stream."""
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.fixture
async def serve():
    """Start a server; all are stopped when the test ends."""
    running = []

    async def start(**arguments):
        running.append(await Served(**arguments).start())
        return running[-1]

    yield start
    for each in running:
        await each.stop()
