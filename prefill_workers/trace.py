"""The spans of one request in a prefill worker, written down when they are over."""

import time

from opentelemetry.context import Context

from engine.request import Request, RequestOutput, RequestTimings
from kv_transfer.moved_range import MovedRange
from telemetry import attributes, tracing
from telemetry.kv_spans import record_sending
from telemetry.prefill_spans import PrefillSpans


class PrefillTrace:
    """Remembers the caller's trace context; its stream may end long before the KV is released."""

    def __init__(
        self, request: Request, transfer_id: int, *, worker_id: str, decode_worker_id: str
    ) -> None:
        self._ranges: list[MovedRange] = []
        self._offered_ns: int | None = None
        self._receiver: Context | None = None
        self._spans = tracing.SpanRecorder(
            {
                attributes.RELEVO_REQUEST_ID: request.request_id,
                attributes.RELEVO_TRANSFER_ID: str(transfer_id),
                attributes.RELEVO_KV_TOKENS: request.num_tokens,
                attributes.RELEVO_PREFILL_WORKER: worker_id,
                attributes.RELEVO_DECODE_WORKER: decode_worker_id,
            }
        )
        self._prefill = PrefillSpans(self._spans)

    def begun(self) -> None:
        """What is cached of the prompt may be fetched, and soon the rest."""
        self._offered_ns = time.time_ns()

    def computed(self, output: RequestOutput, *, is_last: bool) -> None:
        """Some more of the prompt may be fetched, or all of it."""
        self._prefill.computed(output.num_computed_tokens)
        if is_last:
            timings = output.timings or RequestTimings()
            self._prefill.finish(
                wait_s=timings.prefill_wait_s,
                prefill_s=timings.prefill_s,
                num_cached_tokens=output.num_cached_tokens,
            )

    def fail(self, error: str) -> None:
        """The prompt was not computed to its end."""
        self._prefill.fail(error.partition(":")[0])

    def followed_by(self, receiver: Context) -> None:
        """The decode worker follows the transfer in this span of its own."""
        self._receiver = receiver

    def sent(self, moved: MovedRange) -> None:
        """A range has left."""
        self._ranges.append(moved)

    def released(self) -> None:
        """The KV is not needed any more."""
        if self._offered_ns is not None:
            record_sending(
                self._spans, self._ranges, start_ns=self._offered_ns, receiver=self._receiver
            )
