import pytest
from hypothesis import given
from hypothesis import strategies as st
from relevo.v1 import common_pb2

from router.timeline import Timeline
from tests.fakes import FakeClock

SECONDS = st.floats(0.0, 100.0)


def timeline(clock: FakeClock, num_prompt_tokens: int = 10) -> Timeline:
    return Timeline("r", num_prompt_tokens=num_prompt_tokens, arrived_at_s=clock(), now=clock)


@given(queue=SECONDS, route=SECONDS, worker=SECONDS, wait=SECONDS, prefill=SECONDS)
def test_the_parts_always_sum_to_the_first_token(
    queue: float, route: float, worker: float, wait: float, prefill: float
) -> None:
    clock = FakeClock()
    line = timeline(clock)
    clock.advance(queue)
    line.add_queue(queue)
    clock.advance(route)
    record = line.start_attempt(prefill_worker_id="p", decode_worker_id="d")
    record.add_prefill(common_pb2.WorkerTimings(prefill_wait_s=wait, prefill_s=prefill))
    clock.advance(worker)
    line.add_tokens(1, line.attempts[-1])
    report = line.report()
    parts = [report.queue_s, report.route_s, report.prefill_wait_s, report.prefill_s, report.wire_s]
    assert min(parts) >= 0.0
    assert report.first_token_s == pytest.approx(sum(parts), abs=1e-9)
    assert report.total_time_s == pytest.approx(
        report.prompt_time_s + report.completion_s, abs=1e-9
    )


@given(gap=SECONDS, tail=SECONDS, slot=SECONDS, decode=SECONDS)
def test_the_parts_always_sum_to_the_second_token(
    gap: float, tail: float, slot: float, decode: float
) -> None:
    clock = FakeClock()
    line = timeline(clock)
    record = line.start_attempt(prefill_worker_id="p", decode_worker_id="d")
    line.add_tokens(1, record)
    clock.advance(gap)
    record.add_decode(
        common_pb2.WorkerTimings(transfer_tail_s=tail, slot_wait_s=slot, first_decode_s=decode)
    )
    line.add_tokens(1, record)
    report = line.report()
    assert report.first_token_s is not None
    assert report.second_token_s is not None
    parts = report.second_token_parts.values()
    assert min(parts) >= 0.0
    assert sum(parts) == pytest.approx(report.second_token_s - report.first_token_s, abs=1e-9)


def test_what_the_decode_worker_told_stands_while_it_fits() -> None:
    clock = FakeClock()
    line = timeline(clock)
    record = line.start_attempt(prefill_worker_id="p", decode_worker_id="d")
    line.add_tokens(1, record)
    clock.advance(1.0)
    record.add_decode(
        common_pb2.WorkerTimings(transfer_tail_s=0.1, slot_wait_s=0.2, first_decode_s=0.3)
    )
    line.add_tokens(1, record)
    assert tuple(line.report().second_token_parts.values()) == pytest.approx((0.1, 0.2, 0.3, 0.4))


def test_a_failed_attempt_before_the_first_token_is_route_time() -> None:
    clock = FakeClock()
    line = timeline(clock)
    line.start_attempt(prefill_worker_id="p0", decode_worker_id="d").num_cached_tokens = 9
    clock.advance(3.0)
    line.start_attempt(prefill_worker_id="p1", decode_worker_id="d").num_cached_tokens = 4
    clock.advance(1.0)
    line.add_tokens(1, line.attempts[-1])
    report = line.report()
    assert (report.route_s, report.wire_s) == pytest.approx((3.0, 1.0))
    assert (report.prefill_worker_id, report.cached_prefill, report.computed) == ("p1", 4, 6)


def test_after_a_migration_the_first_routing_counts() -> None:
    clock = FakeClock()
    line = timeline(clock)
    first = line.start_attempt(prefill_worker_id="p", decode_worker_id="d0")
    first.num_cached_tokens, first.kv_transfer_bytes = 4, 100
    first.add_decode(common_pb2.WorkerTimings(kv_transfer_s=0.1, slot_wait_s=0.5))
    line.add_tokens(1, line.attempts[-1])
    clock.advance(1.0)
    line.add_tokens(2, line.attempts[-1])
    second = line.start_attempt(prefill_worker_id="", decode_worker_id="d1")
    second.num_cached_tokens, second.kv_transfer_bytes = 12, 50
    second.add_decode(common_pb2.WorkerTimings(kv_transfer_s=0.2, slot_wait_s=0.7))
    line.add_queue(2.0)
    clock.advance(2.0)
    line.add_tokens(2, line.attempts[-1])
    line.end("length")
    report = line.report()
    assert (report.cached_prefill, report.cached_decode, report.computed) == (4, 0, 6)
    assert (report.decode_worker_id, report.last_decode_worker_id) == ("d0", "d1")
    assert (report.queue_s, report.completion_s) == (0.0, 3.0)
    assert (report.kv_transfer_bytes, report.slot_wait_s) == (150, 0.5)
    assert report.kv_transfer_s == pytest.approx(0.3)
    assert report.num_completion_tokens == 5


def test_cached_tokens_never_exceed_the_prompt() -> None:
    line = timeline(FakeClock())
    line.start_attempt(prefill_worker_id="p", decode_worker_id="d").num_cached_tokens = 99
    report = line.report()
    assert (report.cached_prefill, report.computed) == (10, 0)


def test_the_first_end_counts() -> None:
    clock = FakeClock()
    line = timeline(clock)
    clock.advance(1.0)
    line.end("stop")
    clock.advance(1.0)
    line.end("abort")
    assert (line.report().finish_reason, line.report().elapsed_s) == ("stop", 1.0)


def test_a_request_that_never_started_has_an_empty_report() -> None:
    report = timeline(FakeClock()).report()
    assert (report.first_token_s, report.num_attempts, report.computed) == (None, 0, 10)


def test_of_several_choices_the_earliest_tokens_count() -> None:
    clock = FakeClock()
    line = timeline(clock)
    record = line.start_attempt(prefill_worker_id="p", decode_worker_id="d")
    clock.advance(1.0)
    for choice_index in range(3):
        line.add_tokens(1, record, choice_index=choice_index)
    assert line.report().second_token_s is None
    clock.advance(2.0)
    record.add_decode(common_pb2.WorkerTimings(slot_wait_s=0.5, first_decode_s=0.25))
    line.add_tokens(1, record, choice_index=2)
    clock.advance(4.0)
    record.add_decode(common_pb2.WorkerTimings(slot_wait_s=4.5, first_decode_s=0.25))
    line.add_tokens(2, record, choice_index=0)
    assert line.since_last_token_s(1) == 6.0
    report = line.report()
    assert (report.first_token_s, report.second_token_s, report.completion_s) == (1.0, 3.0, 6.0)
    assert (report.slot_wait_s, report.num_completion_tokens) == (0.5, 6)
