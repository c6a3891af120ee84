"""The spans of a decode worker, whichever way its request goes."""

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from decode_workers.trace import DecodeTrace
from engine.request import Request, RequestOutput, RequestTimings
from engine.sampling.params import SamplingParams
from telemetry import provider, tracing
from telemetry.config import TelemetryConfig


class Heard:
    """Keeps what ended."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def started(self, span: ReadableSpan) -> None:
        pass

    def ended(self, span: ReadableSpan) -> None:
        self.spans.append(span)

    def named(self, name: str) -> ReadableSpan:
        return next(span for span in self.spans if span.name == name)

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]


@pytest.fixture
def heard() -> Iterator[Heard]:
    provider.set_up_tracing("test", TelemetryConfig())
    found = Heard()
    provider.add_listener(found)
    yield found
    provider.remove_listener(found)


def trace(*, prefill_worker_id: str) -> DecodeTrace:
    request = Request(
        request_id="r",
        token_ids=[1] * 8,
        num_prompt_tokens=8,
        sampling_params=SamplingParams(max_tokens=9),
    )
    return DecodeTrace(request, 7, worker_id="decode-0", prefill_worker_id=prefill_worker_id)


def output(num_computed: int, *tokens: int, num_preemptions: int = 0) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        start_position=num_computed,
        token_ids=tokens,
        num_computed_tokens=num_computed,
        num_cached_tokens=2,
        num_preemptions=num_preemptions,
        timings=RequestTimings(prefill_wait_s=0.1, prefill_s=0.2) if tokens else None,
    )


def test_alone_it_tells_of_the_prompt_s_chunks_too(heard: Heard) -> None:
    alone = trace(prefill_worker_id="")
    for each in (output(4), output(8, 5), output(9, 6)):
        alone.output(each)
    alone.end()
    assert heard.names == ["prefill", "prefill.queue", "prefill.chunk", "prefill.chunk", "decode"]
    chunks = [span.attributes or {} for span in heard.spans if span.name == "prefill.chunk"]
    ranges = [(each["relevo.kv.token_start"], each["relevo.kv.token_end"]) for each in chunks]
    assert ranges == [(2, 4), (4, 8)]
    prefill = heard.named("prefill")
    assert prefill.attributes is not None
    assert prefill.attributes["relevo.decode.worker"] == "decode-0"
    assert (prefill.end_time or 0) - (prefill.start_time or 0) == 300_000_000


def test_a_preemption_is_an_event_of_the_decode_span(heard: Heard) -> None:
    alone = trace(prefill_worker_id="")
    for number in (0, 1, 1, 2):
        alone.output(output(8, 5, num_preemptions=number))
    alone.end()
    events = heard.named("decode").events
    assert [event.name for event in events] == ["preempted", "preempted"]
    assert [dict(event.attributes or {}) for event in events] == [
        {"relevo.num_preemptions": 1},
        {"relevo.num_preemptions": 2},
    ]


@pytest.mark.parametrize("how", ["lost", "cancelled"])
def test_a_hand_over_that_does_not_come_is_a_failed_span(heard: Heard, how: str) -> None:
    waiting = trace(prefill_worker_id="prefill-0")
    context = waiting.receive()
    if how == "lost":
        waiting.lost("timeout")
    waiting.end()
    assert heard.names == ["kv.recv"]
    span = heard.named("kv.recv")
    assert span.attributes is not None
    assert span.attributes["error.type"] == ("timeout" if how == "lost" else "cancelled")
    assert not span.status.is_ok
    assert tracing.trace_id_of(context) == f"{span.context.trace_id:032x}"


def test_a_long_prompt_is_told_in_a_bounded_number_of_chunks(heard: Heard) -> None:
    alone = trace(prefill_worker_id="")
    for number in range(1, 400):
        alone.output(output(number))
    alone.output(output(400, 5))
    alone.end()
    assert heard.names.count("prefill.chunk") <= 32
    last = heard.spans[-2].attributes or {}
    assert last["relevo.kv.token_end"] == 400
