"""Engines that run as they do on a device, on a CPU."""

from collections.abc import Callable
from typing import Any

import pytest

from engine.engine import Engine
from tests.paged_kernel import offer_kernel


@pytest.fixture
def make_paged_engine(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Engine]:
    offer_kernel(monkeypatch)

    def make(**changes: Any) -> Engine:
        return make_engine(**{"attention": "paged", **changes})

    return make
