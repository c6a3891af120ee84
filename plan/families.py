"""What the weights of each family have that a config.json does not say in so many words.

Taken from transformers' model code; a test builds every family there and counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

# The key of a config.json that says whether something is there; or the answer, where none does.
Flag = bool | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Differences from Llama. Where a config leaves a key out, `defaults` has its value."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: Flag = "attention_bias"
    out_bias: Flag = "attention_bias"
    mlp_bias: Flag = False
    head_bias: bool = False
    has_kv_heads: bool = True  # fewer than heads, where the config says so
    is_gated: bool = True  # the MLP has three matrices, not two
    mlp_width: str = "intermediate_size"  # four times the hidden size where it is null
    has_linear_layers: bool = True  # torch's own, whose bfloat16 weights can stay in their file
    num_norms: int = 2  # of a layer
    norm_vectors: int = 1  # of a norm: a scale; 2 = and a bias; 0 = neither
    query_key_norm: Flag = False
    is_norm_per_head: bool = True  # else as wide as all heads
    has_sinks: bool = False
    is_latent: bool = False  # keys and values are expanded from a narrow vector
    has_experts: bool = False
    expert_width: str = "moe_intermediate_size"
    expert_bias: bool = False
    shared_expert_width: str = ""  # of an expert that every token passes, with a gate of its own
    positions: int | None = None  # learnt ones, besides `max_position_embeddings`
    full_attention_every: int = 0  # layers, where `layer_types` is left out and there is a window
    window_flag: Flag = True  # whether a window counts


_TIED = {"tie_word_embeddings": True}
_GEMMA = Family(defaults={**_TIED, "head_dim": 256})
_COHERE = Family(defaults=_TIED, num_norms=1, query_key_norm="use_qk_norm", is_norm_per_head=False)
_OLMO2 = Family(query_key_norm=True, is_norm_per_head=False)
_QWEN3 = Family(query_key_norm=True, window_flag="use_sliding_window", defaults={"head_dim": 128})
_DEEPSEEK = Family(is_latent=True, has_experts=True, defaults={"qkv_bias": False})
_GLM = Family(defaults={"attention_bias": True, "head_dim": 128}, out_bias=False)
_OLD = Family(
    qkv_bias=True, out_bias=True, mlp_bias=True, is_gated=False, norm_vectors=2, window_flag=False
)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(mlp_bias="mlp_bias"),
    "qwen2": Family(qkv_bias=True, out_bias=False, window_flag="use_sliding_window"),
    "qwen3": _QWEN3,
    "mistral": Family(qkv_bias=False, out_bias=False),
    "ministral": Family(qkv_bias=False, out_bias=False),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, num_norms=4, full_attention_every=2),
    "gemma3_text": replace(_GEMMA, num_norms=4, query_key_norm=True, full_attention_every=6),
    "phi": replace(_OLD, head_bias=True, num_norms=1, query_key_norm="qk_layernorm"),
    "phi3": Family(qkv_bias=False, out_bias=False),
    "olmo": Family(norm_vectors=0),
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, full_attention_every=4),
    "smollm3": Family(defaults=_TIED, mlp_bias="mlp_bias", window_flag="use_sliding_window"),
    "gpt_oss": Family(
        defaults={"attention_bias": True, "head_dim": 64},
        has_sinks=True,
        has_experts=True,
        expert_width="intermediate_size",
        expert_bias=True,
        full_attention_every=2,
    ),
    "mixtral": Family(
        qkv_bias=False, out_bias=False, has_experts=True, expert_width="intermediate_size"
    ),
    "qwen2_moe": Family(
        qkv_bias="qkv_bias",
        out_bias=False,
        defaults={"qkv_bias": True},
        has_experts=True,
        shared_expert_width="shared_expert_intermediate_size",
        window_flag="use_sliding_window",
    ),
    "qwen3_moe": replace(_QWEN3, has_experts=True, defaults={}),
    "olmoe": replace(_OLMO2, has_experts=True, expert_width="intermediate_size"),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": replace(_DEEPSEEK, defaults={"first_k_dense_replace": 3}),
    "glm": _GLM,
    "glm4": replace(_GLM, num_norms=4),
    "glm4_moe": Family(
        out_bias=False,
        query_key_norm="use_qk_norm",
        has_experts=True,
        defaults={"first_k_dense_replace": 1},
    ),
    "gpt2": replace(
        _OLD,
        defaults=_TIED,
        has_kv_heads=False,
        mlp_width="n_inner",
        has_linear_layers=False,
        positions=0,
    ),
    "gpt_neox": replace(
        _OLD,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        defaults={"attention_bias": True},
        has_kv_heads=False,
    ),
    "opt": replace(_OLD, defaults=_TIED, has_kv_heads=False, mlp_width="ffn_dim", positions=2),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, query_key_norm=False, full_attention_every=4),
    "granite": Family(mlp_bias="mlp_bias"),
    "starcoder2": replace(
        _OLD,
        defaults={**_TIED, "use_bias": True},
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        window_flag=True,
    ),
}
