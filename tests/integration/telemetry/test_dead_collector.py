"""A shutdown that a dead collector cannot delay."""

import socket
import subprocess
import sys
import time

SHUT_DOWN_SCRIPT = """
import sys, time
from telemetry import tracing
from telemetry.config import TelemetryConfig
tracing.set_up_tracing("test", TelemetryConfig(otlp_endpoint=sys.argv[1]))
for number in range(600):
    with tracing.span("s"):
        pass
start = time.monotonic()
tracing.shut_down(timeout_s=1.0)
assert time.monotonic() - start < 2.0
"""


def test_a_collector_that_never_answers_delays_no_exit():
    # A listener that accepts nothing: connected, silent, the worst kind.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        subprocess.run(
            [sys.executable, "-c", SHUT_DOWN_SCRIPT, f"127.0.0.1:{silent.getsockname()[1]}"],
            check=True,
            timeout=30,
        )
    assert time.monotonic() - start < 10.0
