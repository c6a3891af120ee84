"""What counts of published configurations, as the hub has them, and their numbers of parameters."""

from typing import Any

from tests.unit.plan.configs import LLAMA_8B, QWEN3_30B


def shape(  # noqa: PLR0917 - a row of a table
    model_type: str, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
    }


GPT2 = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
OPT = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 768,
}
V2_LITE = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
}
QWEN_MOE = {
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "decoder_sparse_step": 1,
}

PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "llama 3.1 8b": (LLAMA_8B, 8_030_261_248),
    "llama 3.2 1b": (
        {**shape("llama", 16, 2048, 8192, 32, 8, 128256), "tie_word_embeddings": True},
        1_235_814_400,
    ),
    "qwen 2.5 7b": (
        {**shape("qwen2", 28, 3584, 18944, 28, 4, 152064), "sliding_window": 131072},
        7_615_616_512,
    ),
    "qwen 3 30b": (QWEN3_30B, 30_532_122_624),
    "qwen 1.5 moe": (
        {**shape("qwen2_moe", 24, 2048, 5632, 16, 16, 151936), **QWEN_MOE},
        14_315_784_192,
    ),
    "mistral 7b": (
        {**shape("mistral", 32, 4096, 14336, 32, 8, 32000), "sliding_window": 4096},
        7_241_732_096,
    ),
    "mixtral 8x7b": (
        {
            **shape("mixtral", 32, 4096, 14336, 32, 8, 32000),
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        46_702_792_704,
    ),
    # These leave out that the table is the head.
    "gemma 2b": (
        {**shape("gemma", 18, 2048, 16384, 8, 1, 256000), "head_dim": 256},
        2_506_172_416,
    ),
    "gemma 2 2b": (
        {**shape("gemma2", 26, 2304, 9216, 8, 4, 256000), "head_dim": 256},
        2_614_341_888,
    ),
    "phi 3 mini": (shape("phi3", 32, 3072, 8192, 32, 32, 32064), 3_821_079_552),
    "deepseek v2 lite": (
        {**shape("deepseek_v2", 27, 2048, 10944, 16, 16, 102400), **V2_LITE},
        15_706_484_224,
    ),
    "gpt2": ({"model_type": "gpt2", **GPT2}, 124_439_808),
    "opt 125m": ({"model_type": "opt", **OPT}, 125_239_296),
    "pythia 160m": (
        {**shape("gpt_neox", 12, 768, 3072, 12, 12, 50304), "tie_word_embeddings": False},
        162_322_944,
    ),
    "starcoder 2 3b": (shape("starcoder2", 30, 3072, 12288, 24, 2, 49152), 3_030_371_328),
}
