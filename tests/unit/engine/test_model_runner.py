"""Which models are served, equal to transformers, and which are refused with a reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.engine import Engine
from tests.unit.engine.conftest import make_request, run, tokens_by_request

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WINDOW: dict[str, Any] = {"sliding_window": 10}
MIXED: dict[str, Any] = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
ROPE: dict[str, Any] = {"factor": 2.0, "rope_theta": 10000.0}

SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "sliding window": ("Mistral", WINDOW),
    "some layers slide": ("Gemma3Text", {**MIXED, "query_pre_attn_scalar": 8}),
    "soft cap": (
        "Gemma2",
        {**MIXED, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    ),
    "dynamic rope": ("Llama", {"rope_parameters": {"rope_type": "dynamic", **ROPE}}),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "encoder": ("T5", {"d_model": 32, "num_layers": 1, "d_kv": 8, "num_heads": 4}, "encoder"),
    "state space": ("Mamba", {}, "attention only"),
    "convolution": ("Lfm2", {"full_attn_idxs": [1]}, "attention only"),
    "latent attention": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 2,
        },
        "one shape",
    ),
    "sinks": ("GptOss", {"num_local_experts": 2, "num_experts_per_tok": 1}, "s_aux"),
    "alibi": ("Bloom", {"n_head": 4, "n_layer": 1}, "layers of full or sliding"),
    "both directions": ("Bert", {}, "later tokens"),
}
CLASSES = {"T5": "T5ForConditionalGeneration", "Bert": "BertLMHeadModel"}


def save_model(directory: Path, name: str, changes: dict[str, Any], dtype: torch.dtype) -> Path:
    shape = {key: value for key, value in SHAPE.items() if not (name == "Lfm2" and "dim" in key)}
    config = getattr(transformers, f"{name}Config")(**{**shape, **changes})
    class_name = CLASSES.get(name, f"{name.removesuffix('Text')}ForCausalLM")
    torch.manual_seed(0)
    getattr(transformers, class_name)(config).to(dtype).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", SERVED)
def test_a_served_model_says_what_transformers_says(tmp_path: Path, name: str):
    path = save_model(tmp_path, *SERVED[name], torch.float64)
    engine = Engine(
        EngineConfig(
            model_path=str(path),
            block_size=4,
            num_kv_blocks=64,
            max_num_seqs=4,
            max_num_batched_tokens=9,
        )
    )
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    prompts = {
        str(n): torch.randint(3, 128, (n,), generator=generator).tolist() for n in (1, 5, 23, 40)
    }
    for request_id, prompt in prompts.items():
        engine.add_request(make_request(request_id, prompt, max_tokens=8))
    tokens = tokens_by_request(run(engine))
    for request_id, prompt in prompts.items():
        output = reference.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=-1
        )
        assert tokens[request_id] == output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_served_is_refused_in_one_line(tmp_path: Path, name: str):
    *model, message = REFUSED[name]
    path = save_model(tmp_path, *model, torch.float32)
    with pytest.raises(ValueError, match=message) as caught:
        Engine(EngineConfig(model_path=str(path), num_kv_blocks=8))
    assert "\n" not in str(caught.value)


def test_rope_that_depends_on_neighbours_is_limited_to_its_original_length(tmp_path: Path):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    }
    path = save_model(tmp_path, "Llama", {"rope_parameters": rope}, torch.float32)
    assert Engine(EngineConfig(model_path=str(path), num_kv_blocks=99)).max_model_len == 64
    with pytest.raises(ValueError, match=r"at most 64: .*longrope"):
        Engine(EngineConfig(model_path=str(path), num_kv_blocks=99, max_model_len=65))


def test_a_directory_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"model_path|config\.json"):
        Engine(EngineConfig(model_path=str(tmp_path)))


def test_pickled_weights_are_not_loaded(tmp_path: Path, tiny_model: Path):
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="safetensors"):
        Engine(EngineConfig(model_path=str(tmp_path)))


def test_the_pool_is_sized_by_use_and_memory(make_engine: Callable[..., Engine]):
    engine = make_engine(num_kv_blocks=None, max_num_seqs=2, max_model_len=50)
    assert engine.block_counts().total == 2 * 7
    assert engine.max_model_len == 50
    assert engine.kv_cache.tensor.shape == (14, 2, 2, 8, 2, 16)


def test_a_dtype_can_be_asked_for(make_engine: Callable[..., Engine]):
    engine = make_engine(dtype="float32")
    assert engine.spec.dtype == "float32"
    assert engine.kv_cache.tensor.dtype is torch.float32
    assert engine.spec.bytes_per_token == 2 * 2 * 2 * 16 * 4


@pytest.mark.parametrize(
    "changes",
    [
        {"model_path": ""},
        {"dtype": "int8"},
        {"block_size": 0},
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 4, "max_num_seqs": 8},
        {"num_kv_blocks": 0},
        {"num_threads": 0},
    ],
)
def test_a_config_nobody_could_run_is_refused(changes: dict[str, Any]):
    with pytest.raises(ValueError, match="expected"):
        EngineConfig(**{"model_path": "m", **changes})
