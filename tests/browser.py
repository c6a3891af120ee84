"""Headless Chromium for tests of the dashboard, and what to do where a program is missing."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Browser, async_playwright

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def require_program(name: str) -> str:
    """The path of a program; without it the test is skipped, or fails where all must be there."""
    found = shutil.which(name)
    if found is None:
        reason = f"needs {name}: apt-get install {name}"
        if os.environ.get("REQUIRE_PROGRAMS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@asynccontextmanager
async def open_browser() -> AsyncIterator[Browser]:
    """A browser of the test's own, with an empty profile."""
    path = require_program("chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            await browser.close()
