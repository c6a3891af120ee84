"""The spans of one request in a prefill worker, written down when they are over."""

import time

from engine.request import Request, RequestOutput, RequestTimings
from kv_transfer.moved_range import MovedRange
from telemetry import attributes, tracing
from telemetry.kv_spans import record_hand_over


class PrefillTrace:
    """Remembers the caller's trace context; its stream may end long before the KV is released."""

    def __init__(
        self, request: Request, transfer_id: int, *, worker_id: str, decode_worker_id: str
    ) -> None:
        self._arrived_ns = time.time_ns()
        self._ranges: list[MovedRange] = []
        self._offered_ns: int | None = None
        self._spans = tracing.SpanRecorder(
            {
                attributes.RELEVO_REQUEST_ID: request.request_id,
                attributes.RELEVO_TRANSFER_ID: str(transfer_id),
                attributes.RELEVO_KV_TOKENS: request.num_tokens,
                attributes.RELEVO_PREFILL_WORKER: worker_id,
                attributes.RELEVO_DECODE_WORKER: decode_worker_id,
            }
        )

    def computed(self, output: RequestOutput, *, is_last: bool) -> None:
        """Some more of the prompt may be fetched, or all of it."""
        if self._offered_ns is None:
            self._offered_ns = time.time_ns()
        if is_last:
            self._finish(output)

    def _finish(self, output: RequestOutput) -> None:
        timings = output.timings or RequestTimings()
        self._spans.record(
            attributes.SPAN_PREFILL_WAIT,
            start_ns=self._arrived_ns,
            duration_s=timings.prefill_wait_s,
        )
        self._spans.record(
            attributes.SPAN_PREFILL,
            start_ns=self._arrived_ns + round(timings.prefill_wait_s * 1e9),
            duration_s=timings.prefill_s,
            more={
                attributes.RELEVO_NUM_CACHED_TOKENS: output.num_cached_tokens,
                attributes.RELEVO_NUM_COMPUTED_TOKENS: output.num_computed_tokens,
            },
        )

    def fail(self, error: str) -> None:
        """The prompt was not computed to its end."""
        self._spans.record(
            attributes.SPAN_PREFILL,
            start_ns=self._arrived_ns,
            duration_s=(time.time_ns() - self._arrived_ns) / 1e9,
            more={attributes.ERROR_TYPE: error.partition(":")[0]},
        )

    def sent(self, moved: MovedRange) -> None:
        """A range has left."""
        self._ranges.append(moved)

    def released(self) -> None:
        """The KV is not needed any more."""
        if self._offered_ns is not None:
            record_hand_over(
                self._spans,
                attributes.SPAN_KV_SEND,
                self._ranges,
                start_ns=self._offered_ns,
            )
