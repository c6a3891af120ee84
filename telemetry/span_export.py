"""Sends spans to an OTLP collector from a bounded queue; a dead collector costs nothing."""

import threading
from typing import Final

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from telemetry import span_codec

MAX_QUEUED_SPANS: Final = 4096  # more are dropped
_MAX_BATCH_SPANS = 512
_EXPORT_INTERVAL_MS = 1000.0
_EXPORT_TIMEOUT_S = 3


class SpanExport:
    """Owns the queue to one collector; without an endpoint it does nothing."""

    def __init__(self, endpoint: str) -> None:
        self._processor: BatchSpanProcessor | None = None
        if endpoint:
            exporter = OTLPSpanExporter(
                endpoint=endpoint,
                insecure=not endpoint.startswith("https://"),
                timeout=_EXPORT_TIMEOUT_S,
            )
            self._processor = BatchSpanProcessor(
                exporter,
                max_queue_size=MAX_QUEUED_SPANS,
                max_export_batch_size=_MAX_BATCH_SPANS,
                schedule_delay_millis=_EXPORT_INTERVAL_MS,
            )

    def send(self, span: ReadableSpan) -> None:
        """Queue one; never waits."""
        if self._processor is not None:
            self._processor.on_end(span_codec.as_sampled(span))

    def shut_down(self, timeout_s: float = 3.0) -> None:
        """Send what is queued and stop; gives up after `timeout_s` if the collector is dead."""
        if self._processor is None:
            return
        # Daemon: a collector that never answers must not hold the process back either.
        thread = threading.Thread(
            target=self._processor.shutdown, name="tracing-shutdown", daemon=True
        )
        self._processor = None
        thread.start()
        thread.join(timeout_s)
