"""Making the demo checkpoint: once, whole or not at all."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cluster import demo_model
from cluster.model_source import DEMOS, SMOLLM2, Demo, demo_at, is_checkpoint, revision_of


def write_checkpoint(directory: Path) -> None:
    directory.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (directory / name).write_text("{}")


def test_several_at_once_convert_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions: list[Path] = []

    def convert(demo: Demo, directory: Path) -> None:
        conversions.append(directory)
        time.sleep(0.1)
        write_checkpoint(directory)

    monkeypatch.setattr(demo_model, "_convert", convert)
    target = tmp_path / ".models" / "demo"
    threads = [
        threading.Thread(target=demo_model.ensure_demo_model, args=(SMOLLM2, target))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert is_checkpoint(target)


def test_a_conversion_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gguf: Path, directory: Path) -> None:
        assert gguf.is_file()
        (directory / "config.json").touch()
        raise OSError("no space left")

    monkeypatch.setattr(demo_model, "CONVERTERS", {SMOLLM2.name: fail})
    with pytest.raises(OSError, match="no space left"):
        demo_model.ensure_demo_model(SMOLLM2, tmp_path / "demo")
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_without_the_package_it_says_what_to_do(tmp_path: Path) -> None:
    missing = replace(SMOLLM2, packages=("no_such_package",))
    with pytest.raises(FileNotFoundError, match="make setup"):
        demo_model.ensure_demo_model(missing, tmp_path / "demo")


def test_another_file_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    other = replace(SMOLLM2, sha256="0" * 64)
    with pytest.raises(ValueError, match="another file"):
        demo_model.ensure_demo_model(other, tmp_path / "demo")
    assert not (tmp_path / "demo").exists()


def test_demos_are_known_by_their_place() -> None:
    assert demo_at(DEMOS["gemma-3-270m"].path) is DEMOS["gemma-3-270m"]
    assert demo_at("/models/gemma-3-270m") is None


def test_a_revision_pins_what_is_served() -> None:
    commit = "0123456789" * 4
    assert revision_of(f"/hub/models--a--b/snapshots/{commit}") == commit
    assert revision_of(str(SMOLLM2.path)) == SMOLLM2.sha256
    assert revision_of("/models/mine") == ""


def test_a_converted_checkpoint_says_what_it_was_made_of_wherever_it_lies(tmp_path: Path) -> None:
    file = tmp_path / "SOURCE.json"
    file.write_text('{"sha256": "c0ffee"}')
    assert revision_of(str(tmp_path)) == "c0ffee"
    for text in ("[]", '{"sha256": 1}', "{", ""):
        file.write_text(text)
        assert revision_of(str(tmp_path)) == ""
