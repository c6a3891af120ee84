"""One live cluster for all that happens here."""

import asyncio
import os
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.chaos.cluster import START_WITHIN_S, LiveCluster
from tests.chaos.report import Report
from tests.chaos.scenario import Truths
from tests.tiny_model import make_tiny_model

SOAK_MINUTES = float(os.environ.get("RELEVO_SOAK_MINUTES", "0"))
SEED = int(os.environ.get("RELEVO_SOAK_SEED", "1"))

_REPORT = Report()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the scenarios have shown, also when all went well."""
    if _REPORT.lines:
        terminalreporter.section(f"chaos, seed {SEED}")
        terminalreporter.write_line(_REPORT.text())


@pytest.fixture
def report() -> Report:
    return _REPORT


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Seeded, and each test's own: one test alone meets what it meets among the others."""
    return random.Random(f"{SEED}-{request.node.name}")


@pytest.fixture(scope="package")
def truths() -> Truths:
    return Truths()


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveCluster]:
    model = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    faults: Path = tmp_path_factory.mktemp("faults")
    # All of it runs with a collector of traces that is connected and says nothing.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        collector = f"telemetry.otlp_endpoint=127.0.0.1:{silent.getsockname()[1]}"
        live = LiveCluster.start(model, faults, collector)
        try:
            await asyncio.to_thread(live.served.wait_until_shown, START_WITHIN_S)
            yield live
        finally:
            await live.close()
            await asyncio.to_thread(live.served.stop)
    assert live.served.survivors() == []
