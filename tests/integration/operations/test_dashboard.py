"""The dashboard in a real browser, over a cluster that works, changes and loses a worker."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Page, expect

from api.ingress import Ingress
from api.tokenizer import Tokenizer
from tests.browser import open_browser
from tests.cluster_processes import ClusterProcesses
from tests.integration.api.conftest import KEY, keys_file, model_path, open_site, tokenizer
from tests.integration.api.test_whole_path import BODY

__all__ = ["keys_file", "model_path", "tokenizer"]  # fixtures

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

expect.set_options(timeout=40_000)
DARK_INK = "rgb(232, 234, 239)"


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    async with open_browser() as browser:
        opened = await browser.new_page(viewport={"width": 1360, "height": 900})
        faults: list[str] = []
        opened.on(
            "console",
            lambda said: faults.append(said.text) if said.type in {"error", "warning"} else None,
        )
        opened.on("pageerror", lambda error: faults.append(str(error)))
        yield opened
        assert faults == []


async def test_the_page_shows_the_cluster_live_and_a_killed_worker_in_red(
    page: Page, ingress: Ingress, http: httpx.AsyncClient, processes: ClusterProcesses
) -> None:
    await page.goto(f"http://127.0.0.1:{ingress.http_port}/dashboard")
    await expect(page.locator("#state")).to_have_text("ready")
    for worker in ("prefill-0", "decode-0", "decode-1"):
        card = page.locator(f"[data-worker={worker}]")
        await expect(card).to_have_attribute("data-state", "ready")
        await expect(card).to_contain_text("of 64 blocks")
    assert await page.locator("[data-link]").count() == 2
    await expect(page.locator("#slow")).to_contain_text("No request has ended yet.")

    # Live: a request shows up in the routes, the numbers and the waterfall, without a reload.
    done = await http.post("/v1/completions", json=BODY)
    name = done.json()["id"].removeprefix("cmpl-")
    await expect(page.locator("#routes")).to_contain_text(name[:8])
    waterfall = page.locator("#slow details[open]").first
    for span in ("attempt", "prefill.chunk", "kv.recv", "decode.first_step"):
        await expect(waterfall).to_contain_text(span)
    await expect(waterfall).to_contain_text("first token: queue")
    assert f"{BODY['max_tokens']} tokens" in await waterfall.inner_text()

    victim = processes.newest("decode-1")
    assert victim is not None
    await asyncio.to_thread(processes.kill, victim)
    lost = page.locator("[data-worker=decode-1]")
    await expect(lost).to_have_attribute("data-state", "lost")
    await expect(lost.locator(".badge")).to_have_css("color", "rgb(200, 30, 30)")
    await expect(page.locator("#state")).to_have_text("degraded")
    await expect(page.locator("#events")).to_contain_text("decode-1 is lost")
    await expect(page.locator("#reasons")).to_contain_text("decode-1 is lost")
    await keyboard_and_colors(page)


async def keyboard_and_colors(page: Page) -> None:
    """All of it can be reached without a mouse, and it follows the system's colors."""
    await page.locator("body").focus()
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.activeElement.className") == "skip"
    summary = page.locator("#slow summary").first
    await summary.focus()
    await page.keyboard.press("Enter")
    await expect(page.locator("#slow details").first).not_to_have_attribute("open", "")
    unnamed = "main section:not([aria-labelledby]), [role=img]:not([aria-label]), th:not([scope])"
    assert await page.locator(unnamed).count() == 0
    assert await page.locator("main, h1, nav[aria-label], [role=status], [role=log]").count() == 5
    await page.emulate_media(color_scheme="dark")
    await expect(page.locator("body")).to_have_css("color", DARK_INK)


async def test_with_keys_a_browser_asks_for_one_and_the_stream_has_it(
    model_path: Path, tokenizer: Tokenizer, keys_file: Path
) -> None:
    async with open_site(model_path, tokenizer, api_keys_file=str(keys_file)) as site:
        for accept in ("text/html", "text/event-stream"):
            headers = {"accept": accept}
            refused = await site.http.get("/dashboard", headers=headers)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"].startswith("Basic")
            wrong = await site.http.get("/dashboard", headers=headers, auth=("anybody", "sk-wrong"))
            assert wrong.status_code == 401
        # Only there: a browser must not be made to act for its user elsewhere.
        elsewhere = await site.http.get("/v1/status", auth=("anybody", KEY))
        assert elsewhere.status_code == 401
        async with open_browser() as browser:
            context = await browser.new_context(
                http_credentials={"username": "anybody", "password": KEY}
            )
            page = await context.new_page()
            await page.goto(f"{site.http.base_url}/dashboard")
            await expect(page.locator("#state")).to_have_text("ready")


async def test_the_page_is_small_and_needs_nothing_from_elsewhere(http: httpx.AsyncClient) -> None:
    page = await http.get("/dashboard")
    assert len(page.content) < 100_000
    assert "default-src 'none'" in page.headers["content-security-policy"]
    outside = [word for word in page.text.split() if "http" in word and "www.w3.org" not in word]
    assert outside == []
