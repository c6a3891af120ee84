"""Tiny random models of the families we serve, and what is special in each."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    # Wide enough that attention, not the last token alone, decides the next one.
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WINDOW: dict[str, Any] = {"sliding_window": 10}
FULL: dict[str, Any] = {"layer_types": ["full_attention", "full_attention"]}
MIXED: dict[str, Any] = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
SMALL_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
GEMMA: dict[str, Any] = {**MIXED, "query_pre_attn_scalar": 8}
# Keys 16 wide, values 12: unequal on purpose.
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
GPT: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 256}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


@dataclass(frozen=True, slots=True)
class Family:
    """One model class with the part of it that attention must get right."""

    name: str  # transformers' class is {name}ForCausalLM
    changes: dict[str, Any] = field(default_factory=dict)
    # Takes the special part away; must change the text, or the test would show nothing.
    without: dict[str, Any] | None = None

    def config(self, **more: Any) -> Any:
        """The model's configuration."""
        return getattr(transformers, f"{self.name}Config")(**{**SHAPE, **self.changes, **more})

    def build(self, config: Any) -> Any:
        """A random model, the same each time."""
        names = {"GPT2": "GPT2LMHeadModel"}
        default = f"{self.name.removesuffix('Text')}ForCausalLM"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return getattr(transformers, names.get(self.name, default))(config)

    def save(self, directory: Path, dtype: torch.dtype = torch.float64) -> Path:
        """Write a checkpoint directory."""
        self.build(self.config()).to(dtype).save_pretrained(directory)
        return directory


FAMILIES: dict[str, Family] = {
    "llama": Family("Llama"),
    "llama 3 rope": Family(
        "Llama",
        _rope(
            "llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
        _rope("default"),
    ),
    "yarn": Family(
        "Llama",
        _rope("yarn", factor=4.0, original_max_position_embeddings=64),
        _rope("default"),
    ),
    "qwen2": Family("Qwen2"),
    "qwen2 window": Family(
        "Qwen2",
        {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
        {"use_sliding_window": False, **FULL},
    ),
    "qwen3": Family("Qwen3"),
    "mistral": Family("Mistral", WINDOW, {"sliding_window": None}),
    "ministral": Family("Ministral", MIXED, FULL),
    "gemma": Family("Gemma"),
    "gemma2": Family(
        "Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0}, {"attn_logit_softcapping": None}
    ),
    "gemma2 window": Family("Gemma2", {**GEMMA, "final_logit_softcapping": None}, FULL),
    # Its sliding layers have a RoPE base of their own.
    "gemma3": Family("Gemma3Text", GEMMA, FULL),
    "phi": Family("Phi"),
    "phi3": Family("Phi3", WINDOW, {"sliding_window": None}),
    "phi4 partial rope": Family("Phi3", _rope("default", partial_rotary_factor=0.5)),
    "olmo": Family("Olmo", {"clip_qkv": 1.0}, {"clip_qkv": None}),
    "olmo2": Family("Olmo2"),
    "olmo3": Family("Olmo3", MIXED, FULL),
    "smollm3": Family("SmolLM3", {"no_rope_layers": [1, 0]}, {"no_rope_layers": [1, 1]}),
    "gpt-oss": Family("GptOss", {**MIXED, **EXPERTS}, FULL),
    "mixtral": Family("Mixtral", EXPERTS, {"num_experts_per_tok": 1}),
    "qwen2 moe": Family("Qwen2Moe", SMALL_EXPERTS),
    "qwen3 moe": Family("Qwen3Moe", SMALL_EXPERTS),
    "olmoe": Family("Olmoe", SMALL_EXPERTS),
    "deepseek v2": Family("DeepseekV2", LATENT),
    "deepseek v3": Family("DeepseekV3", LATENT),
    "glm4 moe": Family("Glm4Moe", {**LATENT, "num_key_value_heads": 2}),
    "gpt2": Family("GPT2", GPT),
    "gpt-neox": Family("GPTNeoX"),
    "opt": Family("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "cohere": Family("Cohere"),
    "cohere2": Family("Cohere2", MIXED, FULL),
    "granite": Family("Granite"),
    "starcoder2": Family("Starcoder2", WINDOW, {"sliding_window": None}),
}
