from collections.abc import Iterator

import pytest
from opentelemetry import trace

from telemetry import provider
from telemetry.config import TelemetryConfig
from telemetry.span_outbox import SpanOutbox


@pytest.fixture
def outbox() -> Iterator[SpanOutbox]:
    provider.set_up_tracing("test", TelemetryConfig())
    outbox = SpanOutbox()
    provider.add_listener(outbox)
    yield outbox
    provider.remove_listener(outbox)


def test_what_was_sent_and_comes_back_is_not_sent_again(outbox: SpanOutbox) -> None:
    with trace.get_tracer("test").start_as_current_span("work"):
        pass
    data, end = outbox.batch(0)
    assert data
    assert end == outbox.num_ended == 1
    # A worker and its ingress in one process hear each other.
    provider.receive(data)
    assert outbox.num_ended == 1
    assert outbox.batch(end) == (b"", end)
