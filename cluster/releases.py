"""What was deployed, when, and exactly how: the memory that a rollback needs.

~/.relevo/releases/<digest>.yaml    one configuration, named by what it holds, never changed
                   history.jsonl    a line for each deployment: when, which, by which code, where
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import yaml

from cluster.config import ClusterConfig, config_from_args
from cluster.config_sources import ConfigError

DIGEST_DIGITS = 16
_HISTORY = "history.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One deployment."""

    at: str  # UTC, ISO 8601
    digest: str  # of the configuration
    build: str  # of the code that was deployed
    version: str
    ray_address: str
    is_rollback: bool
    is_ready: bool  # whether it came to serve


def digest_of(config: ClusterConfig) -> str:
    """Equal for equal configurations, wherever their keys came from."""
    tree = config.model_dump(mode="json")
    if config.is_local:
        tree["cluster"]["token_file"] = ""  # made anew for each run
    body = orjson.dumps(tree, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(body).hexdigest()[:DIGEST_DIGITS]


def now_text() -> str:
    """The time, as the history has it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Releases:
    """Owns one folder of them. Invariant: a configuration's file is written before its line."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.expanduser()

    def keep(self, config: ClusterConfig) -> str:
        """Write the configuration down unless it is; its digest."""
        digest = digest_of(config)
        path = self._directory / f"{digest}.yaml"
        if not path.exists():
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            unfinished = path.with_suffix(f".{os.getpid()}")
            unfinished.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
            unfinished.replace(path)
            path.chmod(0o400)
        return digest

    def note(self, release: Release) -> None:
        """Add a line to the history, whole or not at all."""
        line = orjson.dumps(asdict(release)) + b"\n"
        with (self._directory / _HISTORY).open("ab", buffering=0) as file:
            file.write(line)

    def history(self, ray_address: str) -> list[Release]:
        """What was deployed there, the latest last; a line that is no release is passed over."""
        return [each for each in self._lines() if each.ray_address == ray_address]

    def load(self, digest: str) -> ClusterConfig:
        """The configuration as it was; ConfigError where it is gone or was changed."""
        found = sorted(self._directory.glob(f"{digest}*.yaml")) if digest.isalnum() else []
        if len(found) != 1:
            several = "several" if found else "none"
            raise ConfigError(
                f"got release {digest!r} but {several} of that name: `relevo rollback --list`"
            )
        tree: Any = yaml.safe_load(found[0].read_text())
        config = config_from_args(tree)
        if digest_of(config) != found[0].stem:
            raise ConfigError(f"{found[0]} was changed: it is not the release that it is named by")
        return config

    def previous(self, ray_address: str) -> str:
        """The latest that served before what is deployed now; ConfigError where none is known."""
        history = self.history(ray_address)
        current = history[-1].digest if history else ""
        for release in reversed(history):
            if release.is_ready and release.digest != current:
                return release.digest
        raise ConfigError(
            f"no earlier release that served on {ray_address} in {self._directory}: "
            f"`relevo deploy` keeps them"
        )

    def _lines(self) -> Iterator[Release]:
        path = self._directory / _HISTORY
        for line in path.read_bytes().splitlines() if path.is_file() else ():
            try:
                yield Release(**orjson.loads(line))
            except (orjson.JSONDecodeError, TypeError):
                continue
