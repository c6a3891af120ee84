"""A shutdown that a dead collector cannot delay."""

import socket
import subprocess
import sys
import time

SHUT_DOWN_SCRIPT = """
import sys, time
from opentelemetry.trace import SpanKind
from telemetry import provider, tracing
from telemetry.config import TelemetryConfig
from telemetry.span_export import SpanExport
from telemetry.trace_store import TraceStore
export = SpanExport(sys.argv[1])
provider.set_up_tracing("test", TelemetryConfig())
provider.add_listener(TraceStore(max_requests=9, slow_first_token_s=1.0, export=export.send))
start = time.monotonic()
for number in range(6000):
    with tracing.span("request", kind=SpanKind.SERVER):
        pass
assert time.monotonic() - start < 8.0  # more than the queue holds: dropped, never waited for
start = time.monotonic()
export.shut_down(timeout_s=1.0)
assert time.monotonic() - start < 8.0  # the exporter itself would wait for ten
print(time.monotonic())  # one clock for all processes of a machine
"""


def test_a_collector_that_never_answers_delays_no_exit():
    # A listener that accepts nothing: connected, silent, the worst kind.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        done = subprocess.run(
            [sys.executable, "-c", SHUT_DOWN_SCRIPT, f"127.0.0.1:{silent.getsockname()[1]}"],
            check=True,
            timeout=55,
            stdout=subprocess.PIPE,
        )
        assert time.monotonic() - float(done.stdout) < 8.0
