"""WatchState over loopback gRPC."""

import asyncio

import grpc
import pytest
from relevo.v1 import state_pb2, state_pb2_grpc

from rpc import state_feed
from rpc.feed_pace import FeedPace
from rpc.state_feed import StateFeed


@pytest.fixture
def feed():
    return StateFeed(
        hello=lambda: state_pb2.WatchStateResponse.Hello(pool="decode"),
        load=lambda: state_pb2.WorkerLoad(state="ready"),
    )


def watch(served):
    stub = state_pb2_grpc.WorkerServiceStub(served.channel)
    return stub.WatchState(state_pb2.WatchStateRequest(ingress_id="i"))


async def read_until_load(call):
    messages = []
    while not messages or messages[-1].WhichOneof("message") != "load":
        messages.append(await asyncio.wait_for(call.read(), 30))
    return messages


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_two_ingresses_follow_the_same_changes(serve, feed):
    served = await serve(feed=feed)
    feed.publish(stored=[b"a"])
    calls = [watch(served), watch(served)]
    for call in calls:
        hello, snapshot, load = await read_until_load(call)
        assert (hello.hello.pool, load.load.state) == ("decode", "ready")
        assert list(snapshot.snapshot_chunk.block_hashes) == [b"a"]
    feed.publish(removed=[b"a"], stored=[b"b"])
    for call in calls:
        events, load = await read_until_load(call)
        assert list(events.block_events.removed) == [b"a"]
        assert list(events.block_events.stored) == [b"b"]
        assert (events.sequence, load.sequence) == (3, 4)
        call.cancel()
    await until(lambda: feed.num_subscribers == 0)


async def test_a_quiet_stream_speaks_every_second(serve, feed):
    served = await serve(feed=feed)
    call = watch(served)
    await read_until_load(call)
    assert FeedPace().max_interval_s == 1.0
    tick = await asyncio.wait_for(call.read(), 30)
    assert tick.WhichOneof("message") == "load"
    call.cancel()


async def test_a_reader_that_stops_reading_is_ended_and_resyncs(serve, feed, monkeypatch, caplog):
    monkeypatch.setattr(state_feed, "MAX_PENDING_HASHES", 20_000)
    served = await serve(feed=feed)
    slow, quick = watch(served), watch(served)
    await read_until_load(slow)
    await read_until_load(quick)
    seen = set()

    async def follow(call):
        while (message := await call.read()) is not grpc.aio.EOF:
            seen.update(message.block_events.stored)

    follower = asyncio.create_task(follow(quick))
    # Fill the transport's buffers of the one that does not read, then what waits behind them.
    num_hashes = 0
    while not caplog.records:
        assert num_hashes < 1_000_000
        hashes = [(num_hashes + each).to_bytes(32, "big") for each in range(1_000)]
        num_hashes += len(hashes)
        feed.publish(stored=hashes)
        await asyncio.sleep(0.01)
    while await asyncio.wait_for(slow.read(), 30) is not grpc.aio.EOF:
        pass
    assert await slow.code() is grpc.StatusCode.OK
    await until(lambda: len(seen) == num_hashes)
    assert len(caplog.records) == feed.num_subscribers == 1
    again = watch(served)
    messages = await read_until_load(again)
    snapshot = [each for m in messages for each in m.snapshot_chunk.block_hashes]
    assert len(snapshot) == num_hashes
    follower.cancel()
    again.cancel()


async def test_closing_the_feed_lets_the_server_stop_at_once(serve, feed):
    served = await serve(feed=feed)
    call = watch(served)
    await read_until_load(call)
    feed.close()
    await asyncio.wait_for(served.server.stop(30), 15)
    assert await call.code() is grpc.StatusCode.OK


async def test_a_reader_that_vanishes_while_we_write_is_no_error(serve, feed, caplog):
    served = await serve(feed=feed)
    feed.publish(stored=[number.to_bytes(32, "big") for number in range(400_000)])
    call = watch(served)
    await call.read()
    await asyncio.sleep(0.2)  # the server now waits for room in the transport
    await served.pool.close()
    await until(lambda: feed.num_subscribers == 0)
    await asyncio.sleep(0.1)
    assert caplog.records == []
