"""Requests, outputs and loads on their way through messages."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from relevo.v1 import common_pb2

from engine.load import BlockCounts, EngineLoad
from engine.request import FinishReason, Request, RequestOutput, RequestTimings
from engine.sampling.params import SamplingParams
from rpc.description import WorkerDescription
from rpc.engine_request import (
    error_of,
    finish_reason_from_proto,
    finish_reason_to_proto,
    from_proto,
    output_to_tokens,
    timings_to_proto,
    to_proto,
)
from rpc.errors import InvalidRequestError, RequestFailedError
from rpc.worker_load import to_worker_load

TOKEN_IDS = st.integers(0, 2**31 - 1)
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 2**31 - 1),
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=st.integers(-(2**63), 2**63 - 1),
    min_tokens=st.integers(0, 1000),
    stop_token_ids=st.lists(TOKEN_IDS, max_size=4).map(tuple),
    ignore_eos=st.booleans(),
)


@st.composite
def requests(draw):
    token_ids = draw(st.lists(TOKEN_IDS, min_size=1, max_size=50))
    return Request(
        request_id=draw(st.text(min_size=1, max_size=20)),
        token_ids=token_ids,
        num_prompt_tokens=draw(st.integers(1, len(token_ids))),
        sampling_params=draw(SAMPLING),
        cache_salt=draw(st.text(max_size=10)),
        request_label=draw(st.text(max_size=10)),
        priority=draw(st.integers(-(2**31), 2**31 - 1)),
        hand_over=draw(st.booleans()),
    )


def public_fields(request):
    names = (
        "request_id token_ids num_prompt_tokens sampling_params cache_salt request_label priority "
        "hand_over"
    )
    return [getattr(request, name) for name in names.split()]


def message(**changes):
    fields = {
        "request_id": "r",
        "token_ids": [1, 2, 3],
        "num_prompt_tokens": 2,
        "sampling_params": common_pb2.SamplingParams(max_tokens=5, top_p=1.0),
    }
    return common_pb2.EngineRequest(**(fields | changes))


@given(requests())
def test_a_request_arrives_as_it_was_sent(request):
    wire = common_pb2.EngineRequest.FromString(to_proto(request).SerializeToString())
    copy = from_proto(wire, hand_over=request.hand_over)
    assert public_fields(copy) == public_fields(request)


@pytest.mark.parametrize(
    "changes",
    [
        {"request_id": ""},
        {"token_ids": []},
        {"num_prompt_tokens": 0},
        {"num_prompt_tokens": 4},
        {"num_prompt_tokens": -1},
        {"sampling_params": None},
        {"sampling_params": common_pb2.SamplingParams(max_tokens=0, top_p=1.0)},
        {"sampling_params": common_pb2.SamplingParams(max_tokens=5)},  # top_p 0
        {
            "sampling_params": common_pb2.SamplingParams(
                max_tokens=5, top_p=1.0, temperature=float("nan")
            )
        },
    ],
)
def test_a_request_that_makes_no_sense_is_refused(changes):
    assert from_proto(message()).token_ids == [1, 2, 3]
    with pytest.raises(InvalidRequestError):
        from_proto(message(**changes))


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_finish_reasons_travel_both_ways(reason):
    assert finish_reason_from_proto(finish_reason_to_proto(reason)) is reason


def test_every_finish_reason_of_an_engine_is_known_and_any_other_is_an_error():
    # What an answer calls a tool with is known where its text is read, and nowhere else.
    others = {common_pb2.FINISH_REASON_TOOL_CALLS}
    for number in set(common_pb2.FinishReason.values()) - others:
        reason = finish_reason_from_proto(number)
        assert finish_reason_to_proto(reason) == number
    for number in {*others, 99}:
        assert finish_reason_from_proto(number) is FinishReason.ERROR


def test_an_output_becomes_a_tokens_message():
    output = RequestOutput(
        request_id="r",
        start_position=7,
        token_ids=(4, 5),
        num_computed_tokens=8,
        num_cached_tokens=0,
        finish_reason=FinishReason.ERROR,
        error="why",
    )
    assert output_to_tokens(output) == common_pb2.Tokens(
        start_position=7,
        token_ids=[4, 5],
        finish_reason=common_pb2.FINISH_REASON_ERROR,
        error="why",
    )


def test_timings_of_the_engine_keep_their_names():
    timings = RequestTimings(prefill_wait_s=1, prefill_s=2, slot_wait_s=3, first_decode_s=4)
    assert timings_to_proto(timings) == common_pb2.WorkerTimings(
        prefill_wait_s=1, prefill_s=2, slot_wait_s=3, first_decode_s=4
    )


def test_a_load_says_what_engine_links_and_thread_say():
    counts = BlockCounts(free=1, cached=2, used=3, held=4, quarantined=0, total=10)
    load = EngineLoad(
        num_running=1,
        num_waiting=2,
        num_waiting_for_kv=3,
        num_held_requests=4,
        num_waiting_uncached_tokens=500,
        blocks=counts,
        prefill_tokens_per_s=1000.0,
        step_s=0.01,
        num_preemptions=6,
    )
    link = SimpleNamespace(
        peer_id="prefill-0",
        peer_incarnation=5,
        state="ready",
        generation=2,
        backend="gloo",
        reason="",
        bandwidth_bytes_per_s=1e9,
        latency_s=0.001,
        queued_bytes=64,
        moved_bytes=4096,
    )
    description = WorkerDescription(
        worker_id="decode-0", pool="decode", incarnation=9, address="a:1", node_id="n", pid=11
    )
    got = to_worker_load(
        load,
        description=description,
        state="ready",
        num_transferring=7,
        num_promised_tokens=300,
        heartbeat=SimpleNamespace(age_s=0.5, predicted_step_s=0.02),
        links=[link],
    )
    assert (got.state, got.num_running, got.num_waiting, got.num_transferring) == ("ready", 1, 2, 7)
    assert got.num_promised_tokens == 300
    assert (got.num_waiting_uncached_tokens, got.step_s) == (500, 0.01)
    assert (got.heartbeat_age_s, got.predicted_step_s) == (0.5, 0.02)
    assert {name: getattr(got.blocks, name) for name in counts.__slots__} == {
        name: getattr(counts, name) for name in counts.__slots__
    }
    assert vars(link) == {name: getattr(got.links[0], name) for name in vars(link)}
    assert (got.pid, got.node_id) == (11, "n")


@pytest.mark.parametrize(
    ("is_refused", "kind"), [(True, InvalidRequestError), (False, RequestFailedError)]
)
def test_an_output_that_is_an_error_says_whose_fault_it_is(is_refused, kind):
    output = RequestOutput(
        request_id="r",
        start_position=3,
        token_ids=(),
        num_computed_tokens=3,
        num_cached_tokens=0,
        finish_reason=FinishReason.ERROR,
        error="it broke",
        is_refused=is_refused,
    )
    error = error_of(output)
    assert type(error) is kind
    assert str(error) == "it broke"
