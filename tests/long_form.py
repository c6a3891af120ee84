"""Marks what only `make soak` runs: it takes minutes, or is shown elsewhere in short."""

import os
from collections.abc import Callable
from typing import Any

import pytest

IS_LONG = "RELEVO_SOAK_MINUTES" in os.environ
LONG_FORM = (
    pytest.mark.soak,
    pytest.mark.skipif(not IS_LONG, reason="a long form: make soak"),
)


def long_form(test: Callable[..., Any]) -> Callable[..., Any]:
    """Run this test in the long form only."""
    for mark in LONG_FORM:
        test = mark(test)
    return test
