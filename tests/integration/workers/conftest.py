"""Worker processes on the tiny model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster_processes import ClusterProcesses
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def processes(tmp_path: Path, model_path: Path) -> Iterator[ClusterProcesses]:
    cluster = ClusterProcesses(tmp_path, model_path)
    try:
        yield cluster
    finally:
        cluster.stop_all()
