"""Configurations as the hub has them, with what they leave out left out."""

from typing import Any

from engine.config import EngineConfig
from plan.model_config import ModelConfig
from plan.parameters import count_parameters
from plan.plan import Plan, Site, make_plan
from plan.split import Work
from sim.devices import DEVICES, Device

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    "tie_word_embeddings": False,
}
QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}


WORK = Work(num_input_tokens=2000, num_output_tokens=200, tpot_s=0.05)


def model_config(values: dict[str, Any] = LLAMA_8B, **changes: Any) -> ModelConfig:
    return ModelConfig({**values, **changes}, source="config.json")


def engine_config(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"model_path": "m", "max_num_batched_tokens": 2048, **changes})


def plan(
    config: ModelConfig,
    *,
    device: Device = DEVICES["h100"],
    work: Work = WORK,
    price_per_hour: float | None = None,
    **changes: Any,
) -> Plan:
    engine = engine_config(**changes)
    site = Site(device=device, num_workers=8, measured={}, price_per_hour=price_per_hour)
    return make_plan(config, prefill=engine, decode=engine, work=work, site=site)


def num_parameters(config: ModelConfig) -> int:
    return count_parameters(config).total
