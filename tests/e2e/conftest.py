"""Models shared by the whole-cluster tests."""

from pathlib import Path

import pytest

from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with its tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
