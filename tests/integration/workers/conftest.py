"""The tiny model, written once."""

from pathlib import Path

import pytest

from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))
