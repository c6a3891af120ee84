"""A copy of the weights in a wider dtype: equal, shared, made once, never half."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine import widened_weights
from engine.config import EngineConfig
from engine.engine import Engine
from engine.widened_weights import shared_copy
from tests.tiny_model import make_tiny_model


@pytest.fixture
def narrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny checkpoint in bfloat16, as if it were large."""
    path = make_tiny_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.save_pretrained(path)
    monkeypatch.setattr(widened_weights, "MIN_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


def mapped_files(address: int) -> list[str]:
    """Of this process's mappings, the files at an address."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, *_, name = line.split(maxsplit=5) if line.count(" ") > 5 else (line.split()[0], "")
        start, end = (int(part, 16) for part in place.split("-"))
        if start <= address < end:
            found.append(name.strip())
    return found


def test_the_copy_is_equal_and_its_parameters_are_the_file_s_pages(narrow: Path) -> None:
    copy = shared_copy(narrow, torch.float32)
    assert copy != narrow
    own, widened = (load_file(path / "model.safetensors") for path in (narrow, copy))
    assert own.keys() == widened.keys()
    for name, tensor in widened.items():
        assert tensor.dtype is torch.float32
        assert torch.equal(tensor, own[name].float())
    settings = {"dtype": "float32", "num_kv_blocks": 8, "attention": "torch"}
    engine = Engine(EngineConfig(model_path=str(narrow), **settings))
    parameter = next(engine._runner._model.parameters())
    assert parameter.dtype is torch.float32
    assert mapped_files(parameter.data_ptr()) == [str(copy / "model.safetensors")]


def test_it_is_made_once_and_anew_when_the_weights_change(narrow: Path) -> None:
    copy = shared_copy(narrow, torch.float32)
    made_at = (copy / "model.safetensors").stat().st_mtime_ns
    assert shared_copy(narrow, torch.float32) == copy
    assert (copy / "model.safetensors").stat().st_mtime_ns == made_at
    double = shared_copy(narrow, torch.float64)
    assert double not in {copy, narrow}
    os.utime(narrow / "model.safetensors", ns=(1, 1))
    other = shared_copy(narrow, torch.float32)
    assert other not in {copy, narrow}
    assert not copy.exists()
    assert double.exists()


def test_what_was_left_half_is_made_again(narrow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as broken:
        broken.setattr(widened_weights, "_widen", fail)
        assert shared_copy(narrow, torch.float32) == narrow
    copy = shared_copy(narrow, torch.float32)
    assert load_file(copy / "model.safetensors")
    assert not list(copy.parent.glob("*.unfinished"))


def test_none_is_made_where_it_would_not_help(
    narrow: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert shared_copy(narrow, torch.bfloat16) == narrow
    assert shared_copy(narrow, torch.float16) == narrow  # no wider, and not the same numbers
    monkeypatch.setattr(widened_weights, "_FREE_SHARE", 10**12)
    assert shared_copy(narrow, torch.float32) == narrow
    monkeypatch.setattr(widened_weights, "MIN_BYTES", 10**12)
    assert shared_copy(narrow, torch.float32) == narrow
    (tmp_path / "file").touch()
    monkeypatch.setattr(widened_weights, "MIN_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert shared_copy(narrow, torch.float32) == narrow
