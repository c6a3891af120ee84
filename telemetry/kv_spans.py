"""The span of one side of a hand-over, and one below it for each range that travelled."""

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from opentelemetry.util.types import AttributeValue

from telemetry import attributes
from telemetry.tracing import SpanRecorder


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


def record_hand_over(
    recorder: SpanRecorder,
    name: str,
    ranges: Sequence[Range],
    *,
    start_ns: int,
    more: Mapping[str, AttributeValue] | None = None,
) -> None:
    """Write down one side of a hand-over that ends now."""
    wall_ns = time.time_ns() - round(time.monotonic() * 1e9)
    whole = recorder.record(
        name,
        start_ns=start_ns,
        duration_s=(time.time_ns() - start_ns) / 1e9,
        more={
            attributes.RELEVO_KV_BACKEND: ranges[0].backend if ranges else "",
            attributes.RELEVO_KV_BYTES: sum(each.num_bytes for each in ranges),
            attributes.RELEVO_KV_BLOCKS: sum(each.num_blocks for each in ranges),
            attributes.RELEVO_KV_TICKET_WAIT_S: sum(each.ticket_wait_s for each in ranges),
            **(more or {}),
        },
    )
    for each in ranges:
        recorder.record(
            attributes.SPAN_KV_RANGE,
            start_ns=wall_ns + round(each.started_at * 1e9),
            duration_s=each.ended_at - each.started_at,
            parent=whole,
            more={
                attributes.RELEVO_KV_TOKEN_START: each.token_start,
                attributes.RELEVO_KV_TOKEN_END: each.token_end,
                attributes.RELEVO_KV_BYTES: each.num_bytes,
                attributes.RELEVO_KV_BLOCKS: each.num_blocks,
                attributes.RELEVO_KV_TICKET_WAIT_S: each.ticket_wait_s,
            },
        )
