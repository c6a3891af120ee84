"""Making the demo checkpoint: once, whole or not at all."""

import threading
import time
from pathlib import Path

import pytest

from cluster import demo_model
from cluster.model_source import is_checkpoint


def write_checkpoint(directory: Path) -> None:
    directory.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (directory / name).write_text("{}")


def test_several_at_once_convert_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions: list[Path] = []

    def convert(gguf: Path, directory: Path) -> None:
        conversions.append(gguf)
        time.sleep(0.1)
        write_checkpoint(directory)

    monkeypatch.setattr(demo_model, "_convert", convert)
    monkeypatch.setattr(demo_model, "_gguf_file", lambda: Path("model.gguf"))
    target = tmp_path / ".models" / "demo"
    threads = [
        threading.Thread(target=demo_model.ensure_demo_model, args=(target,)) for _ in range(4)
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
    def fail(gguf: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(demo_model, "_load_model", fail)
    monkeypatch.setattr(demo_model, "_gguf_file", lambda: Path("model.gguf"))
    with pytest.raises(OSError, match="no space left"):
        demo_model.ensure_demo_model(tmp_path / "demo")
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_without_the_package_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "DEMO_PACKAGE", "no_such_package")
    with pytest.raises(FileNotFoundError, match="make setup"):
        demo_model.ensure_demo_model(tmp_path / "demo")
