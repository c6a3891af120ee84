"""The shipped configuration files."""

from pathlib import Path

import yaml

from cluster.config import ClusterConfig, config_from_args, load_config
from cluster.config_sources import dotted_keys

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"


def test_the_local_file_shows_every_key_with_its_default() -> None:
    assert load_config(DEPLOY / "local.yaml", environ={}) == ClusterConfig()
    text = (DEPLOY / "local.yaml").read_text()
    for key, _ in dotted_keys(ClusterConfig):
        assert key.rpartition(".")[2] in text, key


def test_the_serve_file_names_our_builder_and_valid_keys() -> None:
    tree = yaml.safe_load((DEPLOY / "serve.yaml").read_text())
    (application,) = tree["applications"]
    assert tree["proxy_location"] == "Disabled"
    assert application["import_path"] == "cluster.app:build_app"
    assert config_from_args(application["args"]) == ClusterConfig()
