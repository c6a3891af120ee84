"""Finished spans of a worker on their way to the ingresses, which follow its state anyway."""

from collections import deque
from itertools import islice
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan

from telemetry import span_codec

MAX_WAITING_SPANS: Final = 2048
MAX_BATCH_SPANS: Final = 256


class SpanOutbox:
    """Owns the last spans of this process. Whoever reads too slowly misses the oldest.

    Invariant: span number n stands at index n - num_passed.
    """

    def __init__(self) -> None:
        self._spans: deque[ReadableSpan] = deque(maxlen=MAX_WAITING_SPANS)
        self._num_ended = 0
        self._batch: tuple[int, int, bytes] = (0, 0, b"")  # the last one: readers mostly keep pace

    @property
    def num_ended(self) -> int:
        """Spans so far: where a new reader begins."""
        return self._num_ended

    def started(self, span: ReadableSpan) -> None:
        """Ignore what is not complete."""

    def ended(self, span: ReadableSpan) -> None:
        """Keep one for the readers."""
        self._spans.append(span)
        self._num_ended += 1

    def received(self, span: ReadableSpan) -> None:
        """Ignore what was sent once: with a reader in this process it would go round for ever."""

    def batch(self, start: int) -> tuple[bytes, int]:
        """Return the next spans from number `start`, encoded, and where the one after begins."""
        num_passed = self._num_ended - len(self._spans)
        start = max(start, num_passed)
        end = min(self._num_ended, start + MAX_BATCH_SPANS)
        if start == end:
            return b"", end
        if self._batch[:2] != (start, end):
            spans = list(islice(self._spans, start - num_passed, end - num_passed))
            self._batch = (start, end, span_codec.encode(spans))
        return self._batch[2], end
