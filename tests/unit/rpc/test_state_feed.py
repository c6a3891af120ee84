"""The state stream: snapshot and changes fit, rounds keep their pace, slow readers start over."""

import asyncio
import contextlib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relevo.v1 import state_pb2

from faults import plan
from faults.plan import Fault, FaultPlan
from rpc import state_feed
from rpc.feed_pace import FeedPace, RoundTimer
from rpc.state_feed import StateFeed
from tests.fakes import FakeClock

AT_ONCE = FeedPace(min_interval_s=0.0, max_interval_s=30.0, metrics_interval_s=30.0)
SAMPLE = state_pb2.MetricSample(name="relevo_kv_leases_open", labels={"worker": "w"}, value=1)


def make_feed(pace=AT_ONCE, **changes):
    arguments = {
        "hello": lambda: state_pb2.WatchStateResponse.Hello(pool="decode"),
        "load": lambda: state_pb2.WorkerLoad(state="ready"),
        "metric_samples": lambda: [SAMPLE],
    }
    return StateFeed(**(arguments | changes), pace=pace)


class Reader:
    """Follows a stream as an ingress does. Invariant: `hashes` is the prefix map once caught up."""

    def __init__(self, feed):
        self.stream = feed.watch()
        self.hashes = set()
        self.kinds = []
        self.loads = []
        self.next_sequence = 0

    async def read(self):
        message = await asyncio.wait_for(anext(self.stream), 30)
        assert message.sequence == self.next_sequence
        self.next_sequence += 1
        kind = message.WhichOneof("message")
        self.kinds.append(kind)
        if kind == "snapshot_chunk":
            self.hashes.update(message.snapshot_chunk.block_hashes)
        elif kind == "block_events":
            if message.block_events.cleared:
                self.hashes.clear()
            self.hashes.difference_update(message.block_events.removed)
            self.hashes.update(message.block_events.stored)
        elif kind == "load":
            self.loads.append(message.load)
        return message

    async def read_until_load(self):
        while (await self.read()).WhichOneof("message") != "load":
            pass

    async def read_to_the_end(self):
        with contextlib.suppress(StopAsyncIteration):
            while True:
                await self.read()

    async def close(self):
        await self.stream.aclose()


@pytest.fixture
def fault(monkeypatch):
    def set_fault(**fields):
        faults = [Fault(point="control_message", match={}, **fields)]
        monkeypatch.setattr(plan, "_PLAN", FaultPlan(faults, None))

    return set_fault


async def test_a_stream_starts_with_hello_snapshot_and_load():
    feed = make_feed()
    feed.publish(stored=[b"a", b"b"])
    reader = Reader(feed)
    await reader.read_until_load()
    assert reader.kinds == ["hello", "snapshot_chunk", "load"]
    assert reader.hashes == {b"a", b"b"}
    assert reader.loads[0].metrics == [SAMPLE]
    await reader.close()
    assert feed.num_subscribers == 0


async def test_an_empty_cache_is_one_last_chunk():
    reader = Reader(make_feed())
    await reader.read()
    assert (await reader.read()).snapshot_chunk.last
    await reader.close()


@pytest.mark.parametrize(("num_hashes", "num_chunks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
async def test_a_large_snapshot_travels_in_chunks(monkeypatch, num_hashes, num_chunks):
    monkeypatch.setattr(state_feed, "SNAPSHOT_CHUNK_HASHES", 4)
    feed = make_feed()
    feed.publish(stored=[bytes([number]) for number in range(num_hashes)])
    reader = Reader(feed)
    await reader.read_until_load()
    assert Counter(reader.kinds)["snapshot_chunk"] == num_chunks
    assert len(reader.hashes) == num_hashes
    await reader.close()


async def test_changes_made_while_the_snapshot_travels_come_after_it():
    feed = make_feed()
    feed.publish(stored=[b"a"])
    reader = Reader(feed)
    await reader.read()
    feed.publish(removed=[b"a"], stored=[b"b"])
    await reader.read_until_load()
    assert reader.kinds == ["hello", "snapshot_chunk", "block_events", "load"]
    assert reader.hashes == {b"b"}
    await reader.close()


HASHES = st.lists(st.sampled_from([bytes([number]) for number in range(6)]), max_size=4)
STEPS = st.lists(st.tuples(st.booleans(), HASHES, HASHES, st.integers(0, 2)), max_size=25)


@settings(max_examples=80, deadline=None)
@given(STEPS)
def test_readers_that_join_and_read_whenever_end_up_with_the_true_map(steps):
    async def run():
        feed, truth, readers = make_feed(), set(), []
        for cleared, removed, stored, action in steps:
            if action == 1:
                readers.append(Reader(feed))
                await readers[-1].read()
            if action == 2 and readers:
                feed.touch()
                await readers[0].read_until_load()
            if cleared:
                truth.clear()
            truth.difference_update(removed)
            truth.update(stored)
            feed.publish(removed=removed, stored=stored, cleared=cleared)
        for reader in readers:
            feed.touch()
            await reader.read_until_load()
            assert reader.hashes == truth
            await reader.close()

    asyncio.run(run())


async def test_two_readers_count_for_themselves():
    feed = make_feed()
    first = Reader(feed)
    await first.read_until_load()
    second = Reader(feed)
    feed.publish(stored=[b"a"])
    await first.read_until_load()
    await second.read_until_load()
    assert (first.next_sequence, second.next_sequence) == (5, 3)
    assert first.hashes == second.hashes == {b"a"}
    await first.close()
    assert feed.num_subscribers == 1
    await second.close()


async def test_a_quiet_stream_still_ticks():
    reader = Reader(
        make_feed(FeedPace(min_interval_s=0.0, max_interval_s=0.01, metrics_interval_s=30.0))
    )
    await reader.read_until_load()
    await reader.read_until_load()
    assert reader.kinds[-2:] == ["load", "load"]
    # Metric samples are many: the second load goes without.
    assert [len(load.metrics) for load in reader.loads] == [1, 0]
    await reader.close()


async def test_metric_samples_that_have_not_changed_are_not_told_again():
    told = [[SAMPLE]] * 3 + [[SAMPLE, SAMPLE]]
    samples = iter(told)
    pace = FeedPace(min_interval_s=0.0, max_interval_s=0.01, metrics_interval_s=0.0)
    reader = Reader(make_feed(pace, metric_samples=lambda: next(samples)))
    for _ in told:
        await reader.read_until_load()
    assert [len(load.metrics) for load in reader.loads] == [1, 0, 0, 2]
    await reader.close()


async def test_many_changes_make_one_round():
    feed = make_feed(FeedPace(min_interval_s=0.05))
    reader = Reader(feed)
    await reader.read_until_load()
    for number in range(100):
        feed.publish(stored=[bytes([number])])
        feed.touch()
    await reader.read_until_load()
    assert reader.kinds[-2:] == ["block_events", "load"]
    assert len(reader.hashes) == 100
    await reader.close()


async def test_a_slow_reader_is_ended_and_can_start_over(monkeypatch, caplog):
    monkeypatch.setattr(state_feed, "MAX_PENDING_HASHES", 10)
    feed = make_feed()
    slow, quick = Reader(feed), Reader(feed)
    await slow.read()
    await quick.read_until_load()
    for number in range(11):
        feed.publish(stored=[bytes([number])])
        await quick.read_until_load()
    await slow.read_to_the_end()
    assert "block_events" not in slow.kinds
    assert len(caplog.records) == 1
    assert feed.num_subscribers == 1
    again = Reader(feed)
    await again.read_until_load()
    assert again.hashes == quick.hashes
    assert len(again.hashes) == 11
    await quick.close()
    await again.close()


async def test_closing_ends_open_and_new_streams():
    feed = make_feed()
    reader = Reader(feed)
    await reader.read_until_load()
    feed.close()
    for stream in (reader.stream, feed.watch()):
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(stream), 30)
    assert feed.num_subscribers == 0


async def test_a_cancelled_reader_leaves_nothing_behind():
    feed = make_feed()
    reader = Reader(feed)
    await reader.read_until_load()
    task = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert feed.num_subscribers == 0


async def test_a_dropped_message_leaves_a_gap_in_the_sequence(fault):
    fault(action="drop", after=1)
    sequences = []
    async for message in make_feed().watch():
        sequences.append(message.sequence)
        if message.WhichOneof("message") == "load":
            break
    assert sequences == [0, 2]


async def test_a_duplicated_message_bears_the_same_sequence(fault):
    fault(action="duplicate")
    sequences = []
    async for message in make_feed().watch():
        sequences.append(message.sequence)
        if message.WhichOneof("message") == "load":
            break
    assert sequences == [0, 0, 1, 2]


def test_rounds_keep_their_distance_and_their_pulse():
    clock = FakeClock()
    timer = RoundTimer(FeedPace(now=clock))
    assert timer.wait_s(is_changed=False) == 0.0
    assert timer.start_round()
    assert timer.wait_s(is_changed=False) == pytest.approx(1.0)
    assert timer.wait_s(is_changed=True) == pytest.approx(0.05)
    clock.advance(0.06)
    assert timer.wait_s(is_changed=True) == 0.0
    assert not timer.start_round()
    clock.advance(1.0)
    assert timer.wait_s(is_changed=False) == 0.0
    assert timer.start_round()
