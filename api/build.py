"""Which code this process runs: its version, the commit it was checked out at, a digest of it."""

import hashlib
import importlib.metadata
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIGEST_DIGITS = 16
_GIT_WITHIN_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Two processes with the same digest run the same code of ours."""

    version: str  # of the package; "unknown" in a tree that was never installed
    commit: str  # empty where there is no repository, as in an image
    digest: str  # of our own Python, C++ and protos

    def __str__(self) -> str:
        """For people."""
        commit = f", commit {self.commit[:12]}" if self.commit else ""
        return f"version {self.version}, build {self.digest}{commit}"


@cache
def this_build() -> Build:
    """Read once; some milliseconds."""
    return Build(version=_version(), commit=_commit(ROOT), digest=digest_of(ROOT, packages(ROOT)))


def packages(root: Path) -> list[str]:
    """Folders of ours under `root`: what pyproject.toml or the installed package names."""
    project = root / "pyproject.toml"
    if project.is_file():
        named = tomllib.loads(project.read_text())["tool"]["setuptools"]["packages"]
        folders = {name.partition(".")[0] for name in named}
        return sorted({"protos" if name == "relevo" else name for name in folders})
    try:
        text = importlib.metadata.distribution("relevo").read_text("top_level.txt") or ""
    except importlib.metadata.PackageNotFoundError:
        text = ""
    return sorted(text.split())


def digest_of(root: Path, folders: list[str]) -> str:
    """SHA-256 over the names and contents of the code in these folders."""
    files = {
        # An installed package has the stubs elsewhere than the checkout.
        file.relative_to(root).as_posix().removeprefix("protos/"): file
        for folder in folders
        for file in (root / folder).rglob("*")
        if file.suffix in {".py", ".cc", ".cpp", ".h"}
    }
    code = hashlib.sha256()
    for name, file in sorted(files.items()):
        code.update(f"{name}\0".encode())
        code.update(file.read_bytes())
    return code.hexdigest()[:DIGEST_DIGITS]


def _version() -> str:
    try:
        return importlib.metadata.version("relevo")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _commit(root: Path) -> str:
    if not (root / ".git").exists():
        return ""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=_GIT_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
