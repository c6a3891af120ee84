"""A model from others: its code never runs, its pickles are never read."""

import json
import pickle
from pathlib import Path

import pytest
import torch

from api.tokenizer import Tokenizer
from engine.checkpoint import load_config, load_model
from engine.config import EngineConfig
from engine.precision import Precision
from tests.tiny_model import make_tiny_model


class Touch:
    """A pickle that makes a file where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


@pytest.fixture
def touched(tmp_path: Path) -> Path:
    return tmp_path / "touched"


def settings(model: Path) -> EngineConfig:
    return EngineConfig(model_path=str(model), dtype="float32", device="cpu")


def test_code_beside_a_model_is_not_run(model: Path, touched: Path) -> None:
    (model / "evil.py").write_text(
        f"open({str(touched)!r}, 'w')\n"
        "from transformers import LlamaConfig as C, LlamaForCausalLM as M\n"
        "class EvilConfig(C): model_type = 'evil'\nclass EvilModel(M): pass\n"
    )
    config = json.loads((model / "config.json").read_text())
    auto_map = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    config |= {"auto_map": auto_map, "model_type": "evil"}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="model_path"):
        load_config(settings(model))
    assert not touched.exists()


def test_pickled_weights_alone_are_refused_with_the_reason(model: Path, touched: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(touched)))
    with pytest.raises(ValueError, match="can run code"):
        load_config(settings(model))
    assert not touched.exists()


def test_pickles_beside_safetensors_are_not_read(model: Path, touched: Path) -> None:
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(touched)))
    (model / "tokenizer.pkl").write_bytes(pickle.dumps(Touch(touched)))
    precision = Precision(torch.float32, is_narrow=False)
    load_model(settings(model), precision, torch.device("cpu"))
    Tokenizer.load(str(model))
    assert not touched.exists()
