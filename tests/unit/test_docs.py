"""The pages: links lead somewhere, the site lists each page once. No generator is needed."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from bench import site_decisions

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), ROOT / "tests" / "chaos" / "README.md"])


@cache
def tokens(page: Path) -> list[Any]:
    return MarkdownIt().enable("table").parse(page.read_text())


def links(page: Path) -> Iterator[str]:
    for token in tokens(page):
        for child in token.children or ():
            if target := child.attrs.get("href") or child.attrs.get("src"):
                yield str(target)


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in a link."""
    found = tokens(page)
    headings = [
        found[n + 1].content for n, token in enumerate(found) if token.type == "heading_open"
    ]
    return {
        re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", text.strip().lower())) for text in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if file.suffix == ".md":
            # The site has no files but its own.
            assert file.is_relative_to(DOCS) or not page.is_relative_to(DOCS), target
            assert not anchor or anchor in anchors(file), target


def test_each_decision_has_a_number_of_its_own() -> None:
    files = sorted((DOCS / "adr").glob("[0-9]*.md"))
    assert len({file.name[:4] for file in files}) == len(files)
    for file in files:
        assert file.read_text().startswith(f"# {file.name[:4]}: "), file


def listed(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for value in nav.values():
            yield from listed(value)
    else:
        for each in nav:
            yield from listed(each)


def test_the_site_lists_every_page_once() -> None:
    tree = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    config = {"docs_dir": str(DOCS), "nav": tree["nav"]}
    assert tree["hooks"] == [f"{site_decisions.__name__.replace('.', '/')}.py"]
    site_decisions.on_config(config)
    assert sorted(listed(config["nav"])) == sorted(
        str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")
    ), "add the page to `nav` in mkdocs.yml"


def test_the_site_loads_nothing_from_elsewhere() -> None:
    tree = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert tree["theme"]["font"] is False
    assert tree["plugins"] == ["search"]  # `offline` would load a script from a CDN
    assert "extra_javascript" not in tree
    for file in tree["extra_css"]:
        assert "http" not in (DOCS / file).read_text()
    assert tree["strict"] is True
