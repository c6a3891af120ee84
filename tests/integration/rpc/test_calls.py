"""Calls over loopback: token, statuses, context, cancellation, ports, TLS."""

import asyncio
import socket

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry import trace
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from relevo.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2

from rpc import errors
from rpc.channel import ChannelPool
from rpc.config import RpcConfig
from rpc.server import WorkerServer
from rpc.status import from_rpc_error
from telemetry import logs, provider, tracing
from telemetry.config import TelemetryConfig
from tests.integration.rpc.conftest import TOKEN, Served, read_to_the_end


def raising(error):
    def on_call():
        raise error

    return on_call


async def four_kinds(channel):
    """One call of each kind; returns what came back."""
    stub = Served.__new__(Served)
    stub.pool, stub.address = {"": channel}, ""
    peers = await stub.decode_stub.SetPeers(decode_pb2.SetPeersRequest())
    offers = [each async for each in stub.prefill_stub.Transfer(prefill_pb2.TransferRequest())]
    total = await channel.stream_unary("/test.Sums/Total")(iter([b"1", b"2"]))
    entry = prefill_pb2.StoreEntry(key="k", value=b"v")
    link = stub.prefill_stub.OpenLink()
    await link.write(prefill_pb2.OpenLinkRequest(store_entry=entry))
    echo = await link.read()
    await link.done_writing()
    assert await link.read() is grpc.aio.EOF
    return peers, len(offers), total, echo.store_entry == entry


async def code_of_each_kind(channel):
    """The status code of one call of each kind."""
    calls = [
        channel.unary_unary("/relevo.v1.DecodeService/SetPeers")(b""),
        channel.unary_stream("/relevo.v1.PrefillService/Transfer")(b""),
        channel.stream_unary("/test.Sums/Total")(iter([b"1"])),
        channel.stream_stream("/relevo.v1.PrefillService/OpenLink")(),
    ]
    return [(await asyncio.wait_for(call.code(), 30)).name for call in calls]


async def test_the_right_token_opens_all_four_kinds_of_call(serve):
    served = await serve()
    assert await four_kinds(served.channel) == (decode_pb2.SetPeersResponse(), 3, b"3", True)


@pytest.mark.parametrize("token", ["wrong", TOKEN + "x", TOKEN[:-1], TOKEN.upper()])
async def test_a_wrong_token_opens_none(serve, token):
    served = await serve()
    strangers = ChannelPool(token=token, config=RpcConfig())
    assert await code_of_each_kind(strangers.get(served.address)) == ["UNAUTHENTICATED"] * 4
    await strangers.close()


async def test_no_token_opens_none_and_tells_nothing_about_methods(serve):
    served = await serve()
    async with grpc.aio.insecure_channel(served.address) as channel:
        assert await code_of_each_kind(channel) == ["UNAUTHENTICATED"] * 4
        unknown = channel.unary_unary("/relevo.v1.DecodeService/NoSuchMethod")(b"")
        assert await unknown.code() is grpc.StatusCode.UNAUTHENTICATED
    known = served.channel.unary_unary("/relevo.v1.DecodeService/NoSuchMethod")(b"")
    assert await known.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_server_without_a_token_cannot_be_made():
    with pytest.raises(ValueError, match="empty token"):
        WorkerServer(bind_host="127.0.0.1", config=RpcConfig(), token="")


async def test_health_needs_no_token_and_follows_readiness(serve):
    served = await serve()
    async with grpc.aio.insecure_channel(served.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status():
            reply = await stub.Check(health_pb2.HealthCheckRequest())
            return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)

        assert await status() == "SERVING"
        await served.server.set_serving(is_serving=False)
        assert await status() == "NOT_SERVING"
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()


@pytest.mark.parametrize(
    ("raised", "received"),
    [
        (errors.StaleWorkerError("other"), errors.StaleWorkerError),
        (errors.AdmissionRefusedError("full", retry_after_s=1.5), errors.AdmissionRefusedError),
        (ValueError("bad"), errors.InvalidRequestError),
        (KeyError("bug"), errors.RequestFailedError),
    ],
)
async def test_what_a_servicer_raises_arrives_by_name(serve, raised, received):
    served = await serve()
    served.decode.on_call = raising(raised)
    with pytest.raises(grpc.aio.AioRpcError) as unary:
        await served.decode_stub.SetPeers(decode_pb2.SetPeersRequest())
    call = served.decode_stub.Decode(decode_pb2.DecodeRequest())
    assert (await call.read()).num_cached_tokens == 1
    with pytest.raises(grpc.aio.AioRpcError) as stream:
        await call.read()
    for failure in (unary, stream):
        error = from_rpc_error(failure.value)
        assert type(error) is received
        assert error.retry_after_s == getattr(raised, "retry_after_s", None)


async def test_a_cancelled_stream_runs_its_servicers_finally(serve):
    served = await serve()
    call = served.prefill_stub.Prefill(prefill_pb2.PrefillRequest())
    await call.read()
    assert not served.prefill.closed.is_set()
    call.cancel()
    await asyncio.wait_for(served.prefill.closed.wait(), 20)


async def test_a_passed_deadline_runs_its_servicers_finally(serve):
    served = await serve()
    call = served.prefill_stub.Prefill(prefill_pb2.PrefillRequest(), timeout=0.2)
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(served.prefill.closed.wait(), 20)


async def test_one_trace_and_one_request_id_cross_a_call(serve):
    served = await serve()
    provider.set_up_tracing("test", TelemetryConfig())
    exporter = InMemorySpanExporter()
    trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(exporter))
    ids = []

    def on_call():
        with tracing.span("server"):
            ids.append(logs.request_id.get())

    served.decode.on_call = on_call
    with tracing.span("client"), logs.request_scope("req-1"):
        await served.decode_stub.SetPeers(decode_pb2.SetPeersRequest())
        async for _ in served.decode_stub.Decode(decode_pb2.DecodeRequest()):
            pass
    await served.decode_stub.SetPeers(decode_pb2.SetPeersRequest())
    first, second, client, alone = exporter.get_finished_spans()
    assert ids == ["req-1", "req-1", "-"]
    for server in (first, second):
        assert server.parent.span_id == client.context.span_id
        assert server.context.trace_id == client.context.trace_id
    assert alone.parent is None


async def test_a_message_of_8_mib_passes_and_one_above_16_does_not(serve):
    served = await serve()
    request = decode_pb2.SetPeersRequest(ingress_id="x" * (8 << 20))
    await served.decode_stub.SetPeers(request)
    request.ingress_id *= 3
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await served.decode_stub.SetPeers(request)
    assert type(from_rpc_error(failure.value)) is errors.InvalidRequestError


async def test_a_taken_port_is_an_error_and_the_range_is_tried_in_order(serve):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    one_port = RpcConfig(port_range=f"{port}-{port}")
    first = await serve(config=one_port)
    assert first.address == f"127.0.0.1:{port}"
    with pytest.raises(OSError, match="no free port"):
        await Served(config=one_port).start()
    second = await serve(config=RpcConfig(port_range=f"{port}-{port + 20}"))
    assert int(second.address.rsplit(":", 1)[1]) > port


async def test_the_server_listens_on_loopback_only(serve):
    served = await serve()
    port = int(served.address.rsplit(":", 1)[1])
    listening = [
        each.laddr.ip
        for each in psutil.Process().net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port
    ]
    # gRPC listens on a dual-stack socket and shows IPv4 in its IPv6 form.
    assert [each.removeprefix("::ffff:") for each in listening] == ["127.0.0.1"]


async def test_a_pool_keeps_one_channel_per_address_until_it_is_forgotten(serve):
    served = await serve()
    channel, stub = served.channel, served.decode_stub
    assert served.channel is channel
    running = served.prefill_stub.Prefill(prefill_pb2.PrefillRequest())
    await running.read()
    await served.pool.forget(served.address)
    await served.pool.forget(served.address)
    assert served.channel is not channel
    await served.decode_stub.SetPeers(decode_pb2.SetPeersRequest())
    for _ in range(3):
        assert (await running.read()).tokens.token_ids == [7]
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stub.SetPeers(decode_pb2.SetPeersRequest())
    assert type(from_rpc_error(failure.value)) is errors.WorkerUnavailableError
    running.cancel()
    await asyncio.wait_for(served.prefill.closed.wait(), 20)


async def test_closing_the_pool_also_ends_calls_on_forgotten_channels(serve):
    served = await serve()
    running = served.prefill_stub.Prefill(prefill_pb2.PrefillRequest())
    await running.read()
    await served.pool.forget(served.address)
    await served.pool.close()
    await asyncio.wait_for(served.prefill.closed.wait(), 20)


async def test_stopping_lets_a_short_call_end_and_cancels_a_long_one(serve):
    served = await serve()
    link = served.prefill_stub.OpenLink()
    long = served.prefill_stub.Prefill(prefill_pb2.PrefillRequest())
    await long.read()
    entry = prefill_pb2.StoreEntry(key="k")
    await link.write(prefill_pb2.OpenLinkRequest(store_entry=entry))
    await link.read()
    stop = asyncio.create_task(served.server.stop(2.0))
    await asyncio.sleep(0.1)
    await link.write(prefill_pb2.OpenLinkRequest(store_entry=entry))
    assert (await link.read()).store_entry == entry
    await link.done_writing()
    assert await link.code() is grpc.StatusCode.OK
    await asyncio.wait_for(stop, 30)
    assert served.prefill.closed.is_set()
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await read_to_the_end(long)
    assert type(from_rpc_error(failure.value)) is errors.WorkerUnavailableError


async def test_tokens_travel_in_the_same_call_object_as_without_the_pool(serve):
    served = await serve()
    call = served.prefill_stub.Prefill(prefill_pb2.PrefillRequest())
    assert isinstance(call, grpc.aio.UnaryStreamCall)
    assert (await call.read()).tokens == common_pb2.Tokens(token_ids=[7])
    assert decode_pb2_grpc.DecodeServiceStub(served.channel)
    call.cancel()


async def test_on_all_interfaces_the_advertised_address_is_one_that_can_be_dialled(serve):
    served = await serve(bind_host="0.0.0.0")
    assert not served.address.startswith("0.0.0.0")
    async with grpc.aio.insecure_channel(served.address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
