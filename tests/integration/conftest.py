"""Watches every test here for an unpickler that runs under a module of ours."""

import sys
from collections.abc import Iterator
from types import FrameType

import pytest

from tests.unit.test_forbidden_code import PACKAGES, REPOSITORY

PLACES = tuple(f"{REPOSITORY / package}/" for package in PACKAGES)
unpickled: list[str] = []


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if event != "pickle.find_class":
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PLACES):
            unpickled.append(f"{arguments} under {frame.f_code.co_filename}:{frame.f_lineno}")
            return
        frame = frame.f_back


# For good: an audit hook cannot be taken back.
sys.addaudithook(_watch)


@pytest.fixture(autouse=True)
def no_unpickler_under_our_modules() -> Iterator[None]:
    """After each test: no class was looked up by a pickle on behalf of our code."""
    unpickled.clear()
    yield
    assert unpickled == []
