"""`relevo config show|validate`."""

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from cluster import rooms
from cluster.config import ClusterConfig, load_config
from cluster.config_sources import ConfigError


def show(file: Path | None, assignments: Sequence[str]) -> int:
    """Print the effective configuration as a YAML file that `-c` takes."""
    config = _load(file, assignments)
    if config is None:
        return 2
    sys.stdout.write(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    return 0


def validate(file: Path | None, assignments: Sequence[str]) -> int:
    """Say whether the configuration is right."""
    if _load(file, assignments) is None:
        return 2
    sys.stdout.write("the configuration is valid\n")
    return 0


def _load(file: Path | None, assignments: Sequence[str]) -> ClusterConfig | None:
    try:
        config = load_config(file, assignments=assignments)
        rooms.check(config)
    except ConfigError as error:
        sys.stderr.write(f"relevo config: {error}\n")
        return None
    return config
