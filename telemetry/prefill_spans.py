"""The spans of one prompt's computation on either kind of worker: its wait and its chunks."""

import time
from typing import Final

from telemetry import attributes
from telemetry.tracing import SpanRecorder

MAX_CHUNKS: Final = 32  # more are told together: a long prompt has hundreds


class PrefillSpans:
    """Notes when each chunk was computed and writes it all down at the end."""

    def __init__(self, recorder: SpanRecorder) -> None:
        self._recorder = recorder
        self._arrived_ns = time.time_ns()
        self._chunks: list[tuple[int, int]] = []  # (end, tokens computed by then)

    def computed(self, num_tokens: int) -> None:
        """The prompt is now computed up to here."""
        self._chunks.append((time.time_ns(), num_tokens))

    def finish(self, *, wait_s: float, prefill_s: float, num_cached_tokens: int) -> None:
        """The first token was sampled; the durations are the engine's."""
        start_ns = self._arrived_ns + round(wait_s * 1e9)
        num_tokens = self._chunks[-1][1] if self._chunks else 0
        whole = self._recorder.record(
            attributes.SPAN_PREFILL,
            start_ns=self._arrived_ns,
            duration_s=wait_s + prefill_s,
            more={
                attributes.RELEVO_NUM_CACHED_TOKENS: num_cached_tokens,
                attributes.RELEVO_NUM_COMPUTED_TOKENS: max(num_tokens - num_cached_tokens, 0),
            },
        )
        self._recorder.record(
            attributes.SPAN_PREFILL_QUEUE,
            start_ns=self._arrived_ns,
            duration_s=wait_s,
            parent=whole,
        )
        token_start = num_cached_tokens
        for end_ns, token_end in _thinned(self._chunks):
            self._recorder.record(
                attributes.SPAN_PREFILL_CHUNK,
                start_ns=start_ns,
                duration_s=(end_ns - start_ns) / 1e9,
                parent=whole,
                more={
                    attributes.RELEVO_KV_TOKEN_START: token_start,
                    attributes.RELEVO_KV_TOKEN_END: token_end,
                },
            )
            start_ns, token_start = max(start_ns, end_ns), token_end

    def fail(self, error: str) -> None:
        """It was not computed to its end."""
        self._recorder.record(
            attributes.SPAN_PREFILL,
            start_ns=self._arrived_ns,
            duration_s=(time.time_ns() - self._arrived_ns) / 1e9,
            more={attributes.ERROR_TYPE: error},
        )


def _thinned(chunks: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Every so many of them, and always the last."""
    stride = -(-len(chunks) // MAX_CHUNKS) or 1
    return chunks[::-1][::stride][::-1]
