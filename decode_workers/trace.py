"""The spans of one request in a decode worker, written down when they are over."""

import time

from engine.request import Request, RequestOutput, RequestTimings
from kv_transfer.receiver import Received
from telemetry import attributes, tracing
from telemetry.kv_spans import record_hand_over


class DecodeTrace:
    """Remembers the caller's trace context and what there is to tell at the end."""

    def __init__(
        self, request: Request, transfer_id: int, *, worker_id: str, prefill_worker_id: str
    ) -> None:
        self._started_ns = time.time_ns()
        self._arrived_ns: int | None = None
        self._timings = RequestTimings()
        self._num_tokens = 0
        self._spans = tracing.SpanRecorder(
            {
                attributes.RELEVO_REQUEST_ID: request.request_id,
                attributes.RELEVO_TRANSFER_ID: str(transfer_id),
                attributes.RELEVO_DECODE_WORKER: worker_id,
                attributes.RELEVO_PREFILL_WORKER: prefill_worker_id,
            }
        )

    def received(self, received: Received) -> None:
        """All KV is here."""
        self._arrived_ns = now = time.time_ns()
        record_hand_over(
            self._spans, attributes.SPAN_KV_RECEIVE, received.ranges, start_ns=self._started_ns
        )
        self._spans.record(
            attributes.SPAN_TRANSFER_TAIL,
            start_ns=now - round(received.tail_s * 1e9),
            duration_s=received.tail_s,
        )

    def lost(self, reason: str) -> None:
        """The KV did not come."""
        record_hand_over(
            self._spans,
            attributes.SPAN_KV_RECEIVE,
            (),
            start_ns=self._started_ns,
            more={attributes.ERROR_TYPE: reason},
        )

    def token(self, output: RequestOutput) -> None:
        """The engine produced something."""
        self._num_tokens += len(output.token_ids)
        if output.timings is not None:
            self._timings = output.timings

    def end(self) -> None:
        """The stream is over."""
        decode_ns = self._started_ns if self._arrived_ns is None else self._arrived_ns
        if self._arrived_ns is not None and self._num_tokens:
            self._spans.record(
                attributes.SPAN_SLOT_WAIT,
                start_ns=decode_ns,
                duration_s=self._timings.slot_wait_s,
            )
            decode_ns += round(self._timings.slot_wait_s * 1e9)
        self._spans.record(
            attributes.SPAN_DECODE,
            start_ns=decode_ns,
            duration_s=(time.time_ns() - decode_ns) / 1e9,
            more={attributes.GEN_AI_USAGE_OUTPUT_TOKENS: self._num_tokens},
        )
