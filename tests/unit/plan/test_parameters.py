"""Parameters are counted as transformers has them, for every family that is served."""

import json
from typing import Any

import pytest
import torch

from engine.servable import wanted_windows
from plan.attention import layer_windows
from plan.model_config import ModelConfig
from plan.parameters import count_parameters
from tests.tiny_families import EXPERTS, FAMILIES, SMALL_EXPERTS, Family
from tests.unit.plan.configs import LLAMA_8B, QWEN3_30B, model_config, num_parameters
from tests.unit.plan.published import PUBLISHED

# Switches that no family's own example turns.
TURNED = {
    "glm": Family("Glm"),
    "glm4": Family("Glm4"),
    "norms of queries and keys": Family("Phi", {"qk_layernorm": True}),
    "tied": Family("Llama", {"tie_word_embeddings": True}),
    "narrow vectors": Family("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 16}),
    "every other layer": Family("Qwen2Moe", {**SMALL_EXPERTS, "decoder_sparse_step": 2}),
    "dense first": Family("Qwen3Moe", {**SMALL_EXPERTS, "mlp_only_layers": [0]}),
    "biases": Family("Llama", {"attention_bias": True, "mlp_bias": True}),
    "norms as wide as all heads": Family("Cohere", {"use_qk_norm": True}),
    "no bias": Family("GPTNeoX", {"attention_bias": False}),
}


@pytest.mark.parametrize("name", [*FAMILIES, *TURNED])
def test_every_family_is_counted_exactly(name: str) -> None:
    family = {**FAMILIES, **TURNED}[name]
    theirs = family.config()
    with torch.device("meta"):
        model = family.build(theirs)
    ours = ModelConfig(json.loads(theirs.to_json_string(use_diff=False)), source=name)
    counted = count_parameters(ours)
    assert counted.total == sum(parameter.numel() for parameter in model.parameters())
    kinds = wanted_windows(theirs, 256)
    if kinds and ours.family.window_flag is not False:
        assert [window is not None for window in layer_windows(ours)] == list(kinds.values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_size(name: str) -> None:
    values, published = PUBLISHED[name]
    assert num_parameters(model_config(values)) == published


def test_a_token_passes_few_of_the_experts() -> None:
    counted = count_parameters(model_config(QWEN3_30B))
    # 3.3 billion with table and head, which are not multiplied in every layer.
    assert counted.active + counted.table + counted.head == pytest.approx(3.35e9, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba2"}, "'mamba2' model but expected one of llama"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by gptq"),
        ({"is_encoder_decoder": True}, "it has an encoder"),
        ({"vision_config": {}}, "text alone"),
        ({"layer_types": ["linear_attention"]}, "full or sliding"),
        ({"num_kv_shared_layers": 3}, "share no KV"),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers = '32'"),
    ],
)
def test_what_cannot_be_served_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        num_parameters(model_config(**changes))


def test_the_text_of_a_nested_configuration_counts() -> None:
    nested = {"model_type": "wrapper", "text_config": {**LLAMA_8B, "model_type": "llama"}}
    assert num_parameters(model_config(nested)) == num_parameters(model_config())


def test_experts_have_two_names() -> None:
    old = {**QWEN3_30B, "num_local_experts": 128}
    del old["num_experts"]
    assert num_parameters(model_config(old)) == num_parameters(model_config(QWEN3_30B))
    assert set(EXPERTS) == {"num_local_experts", "num_experts_per_tok"}
