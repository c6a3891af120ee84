"""The spans of one request in a decode worker; but for the hand-over written down at the end."""

import time

from opentelemetry import trace
from opentelemetry.context import Context

from engine.request import Request, RequestOutput, RequestTimings
from kv_transfer.receiver import Received
from telemetry import attributes, tracing
from telemetry.kv_spans import end_receiving
from telemetry.prefill_spans import PrefillSpans
from telemetry.tracing import Moment


class DecodeTrace:
    """Remembers the caller's trace context and what there is to tell at the end."""

    def __init__(
        self, request: Request, transfer_id: int, *, worker_id: str, prefill_worker_id: str
    ) -> None:
        self._decode_ns = time.time_ns()  # when there was nothing to wait for any more
        self._timings = RequestTimings()
        self._num_tokens = 0
        self._num_preemptions = 0
        self._preempted: list[Moment] = []
        self._spans = tracing.SpanRecorder(
            {
                attributes.RELEVO_REQUEST_ID: request.request_id,
                attributes.RELEVO_TRANSFER_ID: str(transfer_id),
                attributes.RELEVO_DECODE_WORKER: worker_id,
                attributes.RELEVO_PREFILL_WORKER: prefill_worker_id,
            }
        )
        self._receiving: tuple[trace.Span, Context] | None = None
        self._prefill = None if prefill_worker_id else PrefillSpans(self._spans)

    def receive(self) -> Context:
        """The KV begins to come; the context is that of the span."""
        self._receiving = self._spans.begin(attributes.SPAN_KV_RECEIVE)
        return self._receiving[1]

    def received(self, received: Received) -> None:
        """All KV is here."""
        if self._receiving is not None:
            end_receiving(self._spans, self._receiving, received.ranges, tail_s=received.tail_s)
            self._receiving = None
        self._decode_ns = time.time_ns()

    def lost(self, reason: str) -> None:
        """The KV did not come."""
        if self._receiving is not None:
            span = self._receiving[0]
            span.set_attribute(attributes.ERROR_TYPE, reason)
            span.set_status(trace.StatusCode.ERROR, reason)
            span.end()
            self._receiving = None

    def output(self, output: RequestOutput) -> None:
        """The engine said something."""
        if output.num_preemptions > self._num_preemptions:
            # Noticed with the first output after it; the gap before that output is its price.
            self._num_preemptions = output.num_preemptions
            facts = {attributes.RELEVO_NUM_PREEMPTIONS: output.num_preemptions}
            moment = Moment(name=attributes.EVENT_PREEMPTED, at_ns=time.time_ns(), attributes=facts)
            self._preempted.append(moment)
        if output.timings is not None:
            self._timings = output.timings
        if self._prefill is not None and not self._num_tokens:
            self._prefill_step(self._prefill, output)
        self._num_tokens += len(output.token_ids)

    def _prefill_step(self, prefill: PrefillSpans, output: RequestOutput) -> None:
        prefill.computed(output.num_computed_tokens)
        if output.token_ids:
            prefill.finish(
                wait_s=self._timings.prefill_wait_s,
                prefill_s=self._timings.prefill_s,
                num_cached_tokens=output.num_cached_tokens,
            )
            self._decode_ns = time.time_ns()

    def end(self) -> None:
        """The stream is over."""
        if self._receiving is not None:
            self.lost("cancelled")
        if not self._num_tokens:
            return
        whole = self._spans.record(
            attributes.SPAN_DECODE,
            start_ns=self._decode_ns,
            duration_s=(time.time_ns() - self._decode_ns) / 1e9,
            more={attributes.GEN_AI_USAGE_OUTPUT_TOKENS: self._num_tokens},
            events=self._preempted,
        )
        if self._prefill is None:
            slot_wait_s, first_decode_s = self._timings.slot_wait_s, self._timings.first_decode_s
            self._spans.record(
                attributes.SPAN_SLOT_WAIT,
                start_ns=self._decode_ns,
                duration_s=slot_wait_s,
                parent=whole,
            )
            self._spans.record(
                attributes.SPAN_FIRST_STEP,
                start_ns=self._decode_ns + round(slot_wait_s * 1e9),
                duration_s=first_decode_s,
                parent=whole,
            )
