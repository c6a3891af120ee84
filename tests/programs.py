"""Programs that some tests need, and what to do where one is missing."""

import os
import shutil

import pytest


def require_program(name: str, package: str = "") -> str:
    """The path of a program; without it the test is skipped, or fails where all must be there."""
    found = shutil.which(name)
    if found is None:
        reason = f"needs {name}: apt-get install {package or name}"
        if os.environ.get("REQUIRE_PROGRAMS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return found
