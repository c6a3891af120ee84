"""Layers that compute in bfloat16: a prompt's tokens come out alike in one step and in many.

In one step a prompt is long enough for products by turned weights, in small chunks it is not.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.config import EngineConfig
from engine.engine import Engine
from engine.token_logprobs import TokenLogprobs
from tests.tiny_families import VOCAB_SIZE, Family
from tests.unit.engine.conftest import make_request, run

# Widths that tiles can have; the vocabulary's last outputs do not fill one.
TILED: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
}
FAMILIES = {
    "llama": Family("Llama", TILED),
    "heads that do not fill tiles": Family("Llama", {**TILED, "head_dim": 40}),
    "biases": Family("Llama", {**TILED, "attention_bias": True, "mlp_bias": True}),
    "qwen3": Family("Qwen3", TILED),  # queries and keys have norms
    "gemma3": Family("Gemma3Text", {**TILED, "query_pre_attn_scalar": 32}),  # norms behind, too
    "granite": Family("Granite", {**TILED, "residual_multiplier": 0.5}),
    "one large layer": Family("Llama", {**TILED, "hidden_size": 2080, "intermediate_size": 4128}),
}
LENGTH = 250
CHUNKS = (LENGTH, 200, 100, 7)


def save(family: Family, directory: Path) -> Path:
    model = family.build(family.config())
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.normal_()
    model.bfloat16().save_pretrained(directory)
    return directory


def prompt_logprobs(path: Path, chunk: int, num_threads: int) -> list[TokenLogprobs]:
    engine = Engine(
        EngineConfig(
            model_path=str(path),
            dtype="bfloat16",
            block_size=16,
            num_kv_blocks=32,
            max_num_seqs=2,
            max_num_batched_tokens=chunk,
            num_threads=num_threads,
        )
    )
    tokens = torch.randint(
        3, VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    engine.add_request(make_request("a", tokens, max_tokens=1, num_prompt_logprobs=2))
    outputs = run(engine)
    engine.check_integrity()
    return [
        entry
        for output in outputs
        if output.prompt_logprobs
        for entry in output.prompt_logprobs.entries
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_comes_out_alike_however_it_is_cut(name: str, tmp_path: Path):
    path = save(FAMILIES[name], tmp_path)
    whole = prompt_logprobs(path, LENGTH, num_threads=1)
    assert len(whole) == LENGTH - 1
    assert len({entry.logprob for entry in whole}) > LENGTH / 2
    for chunk in CHUNKS:
        assert prompt_logprobs(path, chunk, num_threads=2) == whole
