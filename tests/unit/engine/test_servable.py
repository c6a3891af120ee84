"""Models that would be served wrongly are refused at load, in one line that says why."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine import servable
from engine.config import EngineConfig
from engine.engine import Engine
from tests.tiny_families import GEMMA, MIXED, Family

# The configuration alone says so: no weight is read.
BY_CONFIG: dict[str, tuple[str, dict[str, Any], str]] = {
    "encoder": ("T5", {}, "it has an encoder"),
    "speech to text": ("Whisper", {}, "it has an encoder"),
    "state space": ("Mamba", {}, r"\['linear_attention'\] layers"),
    "state space beside attention": ("Jamba", {}, r"\['linear_attention'\] layers"),
    "convolution": ("Lfm2", {"full_attn_idxs": [1]}, r"\['conv'\] layers"),
    "linear attention": ("Qwen3Next", {}, r"\['linear_attention'\] layers"),
    "recurrent": ("RecurrentGemma", {}, r"\['linear_attention'\] layers"),
    "chunked attention": ("Llama4Text", {}, r"\['chunked_attention'\] layers"),
    "vision tower": ("Gemma3", {}, "of text alone: it has .*vision_config"),
    "audio tower": ("Qwen2Audio", {}, "of text alone: it has .*audio_config"),
    "hybrid": ("FalconH1", {}, r"\['hybrid'\] layers"),
    "shared KV": ("Gemma3nText", {}, "share no KV: 15"),
}
UNEQUAL = {**MIXED, "global_head_dim": 16, "vocab_size_per_layer_input": 128}
# Seen only when the model runs.
BY_PROBE: dict[str, tuple[Family, str]] = {
    "alibi": (Family("Bloom", {"n_head": 4, "n_layer": 2}), "ALiBi"),
    "its own mask": (Family("Doge"), "a mask of its own making"),
    "two attentions per layer": (Family("DiffLlama"), r"ran in layers \[0, 0, 1, 1\]"),
    "both directions": (
        Family("Gemma3Text", {**GEMMA, "use_bidirectional_attention": True}),
        "later tokens",
    ),
    "unequal layers": (Family("Gemma4Text", UNEQUAL), "of one shape"),
    "untold window": (
        Family("Phimoe", {"sliding_window": 10, "num_local_experts": 2}),
        "do not tell their sliding window",
    ),
    "arguments that do not arrive": (Family("StableLm"), "attention can be replaced"),
}


def load(path: Path) -> Engine:
    return Engine(EngineConfig(model_path=str(path), num_kv_blocks=8))


def refusal(path: Path) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the callers look at the text
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", BY_CONFIG)
def test_refused_by_its_configuration(tmp_path: Path, name: str):
    class_name, changes, message = BY_CONFIG[name]
    getattr(transformers, f"{class_name}Config")(**changes).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert re.search(message, refusal(tmp_path))


@pytest.mark.parametrize("name", BY_PROBE)
def test_refused_by_what_it_does(tmp_path: Path, name: str):
    family, message = BY_PROBE[name]
    assert re.search(message, refusal(family.save(tmp_path, torch.float32)))


def test_refused_where_tokens_meet_outside_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Attention and a state space side by side in each layer, under a name that gives nothing away.
    monkeypatch.setattr(servable, "_KNOWN_LAYERS", frozenset({"hybrid"}))
    sizes = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
    path = Family("FalconH1", sizes).save(tmp_path, torch.float32)
    assert "tokens meet in attention only" in refusal(path)


def test_pickled_weights_are_not_loaded(tmp_path: Path):
    transformers.LlamaConfig().save_pretrained(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert "expected *.safetensors in it: pickled weights" in refusal(tmp_path)


def test_code_beside_the_weights_is_not_run(tmp_path: Path):
    marker = tmp_path / "was_run"
    (tmp_path / "configuration_evil.py").write_text(f"open({str(marker)!r}, 'w')")
    (tmp_path / "config.json").write_text(
        '{"model_type": "evil", "auto_map": {"AutoConfig": "configuration_evil.EvilConfig"}}'
    )
    (tmp_path / "model.safetensors").touch()
    assert "contains custom code" in refusal(tmp_path)
    assert not marker.exists()
