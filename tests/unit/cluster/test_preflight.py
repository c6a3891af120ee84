"""What is found wrong before Ray is started."""

from pathlib import Path

import pytest

from cluster import preflight
from cluster.config import ClusterConfig, load_config
from cluster.model_source import is_hub_id, missing_from_checkpoint
from cluster.start_error import StartError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (directory / name).write_text("{}")
    return directory


def config_for(model: object, *assignments: str) -> ClusterConfig:
    # A cluster that is joined has no ports to check here: unit tests open no sockets.
    joined = ("cluster.ray_address=auto", f"model.path={model}")
    return load_config(assignments=(*joined, *assignments), environ={})


def test_a_whole_checkpoint_passes(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    preflight.check(config_for(checkpoint))


def test_joining_whatever_runs_needs_something_that_runs(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("psutil.process_iter", lambda _: iter(()))
    with pytest.raises(StartError, match="no Ray runs on this machine"):
        preflight.check(config_for(checkpoint))


def test_a_missing_model_is_named() -> None:
    with pytest.raises(StartError, match=r"^model.path /no/such/model does not exist"):
        preflight.check(config_for("/no/such/model"))


def test_a_directory_without_weights_says_what_lacks(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(StartError, match=r"no checkpoint: no weights"):
        preflight.check(config_for(checkpoint))
    assert missing_from_checkpoint(checkpoint.parent) == [
        "config.json",
        "a tokenizer",
        "weights (*.safetensors)",
    ]


def test_a_file_is_no_model(checkpoint: Path) -> None:
    with pytest.raises(StartError, match="is a file"):
        preflight.check(config_for(checkpoint / "config.json"))


@pytest.mark.parametrize("key", ["ingress.api_keys_file", "cluster.token_file"])
def test_a_missing_file_is_named(checkpoint: Path, key: str) -> None:
    with pytest.raises(StartError, match=f"{key} /no/file does not exist"):
        preflight.check(config_for(checkpoint, f"{key}=/no/file"))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("HuggingFaceTB/SmolLM2-135M", True),
        ("gpt2", True),
        ("/models/x", False),
        ("./x", False),
        ("~/x", False),
        ("a/b/c", False),
    ],
)
def test_what_looks_like_a_hub_id(path: str, expected: bool) -> None:
    assert is_hub_id(path) is expected


def test_a_directory_of_that_name_wins_over_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("gpt2")


def test_a_ray_address_must_be_one(checkpoint: Path) -> None:
    for address in ("somewhere", "ray://host:10001"):
        with pytest.raises(StartError, match="neither local, auto nor host:port"):
            preflight.check(config_for(checkpoint, f"cluster.ray_address={address}"))
