"""The span of one side of a hand-over, and one below it for each range that travelled."""

import time
from collections.abc import Sequence
from typing import Final, Protocol

from opentelemetry.context import Context
from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from telemetry import attributes
from telemetry.tracing import SpanRecorder

MAX_RANGES: Final = 32  # of one side; a long prompt travels in hundreds


class Range(Protocol):
    """What the KV plane tells of one operation; times on the monotonic clock."""

    @property
    def token_start(self) -> int:
        """First token."""

    @property
    def token_end(self) -> int:
        """One behind the last token."""

    @property
    def backend(self) -> str:
        """How it travelled."""

    @property
    def num_bytes(self) -> int:
        """What travelled."""

    @property
    def num_blocks(self) -> int:
        """Blocks of this side's pool that hold a part of it."""

    @property
    def ticket_wait_s(self) -> float:
        """From asking to moving."""

    @property
    def started_at(self) -> float:
        """When it began to move."""

    @property
    def ended_at(self) -> float:
        """When it had moved."""


def record_sending(
    recorder: SpanRecorder, ranges: Sequence[Range], *, start_ns: int, receiver: Context | None
) -> None:
    """Write down the prefill worker's side, which ends now; linked to the receiver's if known."""
    whole = recorder.record(
        attributes.SPAN_KV_SEND,
        start_ns=start_ns,
        duration_s=(time.time_ns() - start_ns) / 1e9,
        more=_facts(ranges),
        links=() if receiver is None else (receiver,),
    )
    _record_ranges(recorder, ranges, whole)


def end_receiving(
    recorder: SpanRecorder, begun: tuple[Span, Context], ranges: Sequence[Range], *, tail_s: float
) -> None:
    """End the decode worker's side now; the tail is what came after the prompt was computed."""
    now_ns = time.time_ns()
    span, context = begun
    span.set_attributes(_facts(ranges))
    # Before its parts: who hears of these must know whose they are.
    span.end(now_ns)
    _record_ranges(recorder, ranges, context)
    recorder.record(
        attributes.SPAN_KV_TAIL,
        start_ns=now_ns - round(tail_s * 1e9),
        duration_s=tail_s,
        parent=context,
    )


def _facts(ranges: Sequence[Range]) -> dict[str, AttributeValue]:
    return {
        attributes.RELEVO_KV_BACKEND: ranges[0].backend if ranges else "",
        attributes.RELEVO_KV_BYTES: sum(each.num_bytes for each in ranges),
        attributes.RELEVO_KV_BLOCKS: sum(each.num_blocks for each in ranges),
        attributes.RELEVO_KV_TICKET_WAIT_S: sum(each.ticket_wait_s for each in ranges),
    }


def _record_ranges(recorder: SpanRecorder, ranges: Sequence[Range], parent: Context) -> None:
    wall_ns = time.time_ns() - round(time.monotonic() * 1e9)
    for each in ranges[:MAX_RANGES]:
        recorder.record(
            attributes.SPAN_KV_RANGE,
            start_ns=wall_ns + round(each.started_at * 1e9),
            duration_s=each.ended_at - each.started_at,
            parent=parent,
            more={
                attributes.RELEVO_KV_TOKEN_START: each.token_start,
                attributes.RELEVO_KV_TOKEN_END: each.token_end,
                attributes.RELEVO_KV_BYTES: each.num_bytes,
                attributes.RELEVO_KV_BLOCKS: each.num_blocks,
                attributes.RELEVO_KV_TICKET_WAIT_S: each.ticket_wait_s,
            },
        )
