"""Weights that stay in bfloat16 under computation in float32."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.engine import Engine
from engine.native.library import load_library
from engine.widening import WideningLinear, is_all_bfloat16, keep_narrow
from tests.tiny_families import FAMILIES
from tests.unit.engine.conftest import make_request, random_prompt, run, tokens_by_request

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None, reason="no C++ compiler on this machine"
)


@pytest.fixture(autouse=True)
def library() -> None:
    assert load_library(), "make setup builds it"


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 16, 48, 49, 130])
@pytest.mark.parametrize("shape", [(576, 192), (33, 7), (8, 1), (100, 50)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_equals_the_one_in_float32(num_tokens: int, shape: tuple[int, int], has_bias: bool):
    torch.manual_seed(0)
    narrow = nn.Linear(*shape, bias=has_bias, dtype=torch.bfloat16)
    hidden = torch.randn(1, num_tokens, shape[0])
    truth = nn.functional.linear(
        hidden, narrow.weight.float(), narrow.bias.float() if has_bias else None
    )
    layer = WideningLinear(narrow)
    if has_bias:
        layer.bias = nn.Parameter(narrow.bias.float())
    with torch.inference_mode():
        assert torch.allclose(layer(hidden), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(576, 192), (1000, 37)], ids=str)
def test_a_token_is_computed_alike_alone_and_among_others(shape: tuple[int, int]):
    torch.manual_seed(0)
    layer = WideningLinear(nn.Linear(*shape, bias=False, dtype=torch.bfloat16))
    hidden = torch.randn(300, shape[0])
    with torch.inference_mode():
        alone = torch.cat([layer(hidden[n : n + 1]) for n in range(40)])
        for count in (2, 6, 7, 16, 40, 300):
            assert torch.equal(layer(hidden[:count])[:40], alone[:count])


# Gemma scales its embeddings by a constant that bfloat16 would round; the others hold experts,
# biases and tied weights.
@pytest.mark.parametrize("family", ["gemma3", "qwen2", "gpt-oss", "cohere"])
def test_a_model_computes_as_if_it_had_been_loaded_in_float32(family: str, tmp_path: Path):
    path = FAMILIES[family].save(tmp_path, torch.bfloat16)
    assert is_all_bfloat16(path)
    truth = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    keep_narrow(model)
    ids = torch.tensor([[5, 9, 3, 77, 64, 2, 8]])
    with torch.inference_mode():
        expected, logits = truth(ids).logits, model(ids).logits
    assert logits.dtype is torch.float32
    assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert any(parameter.dtype is torch.bfloat16 for parameter in model.parameters())


@pytest.mark.parametrize("family", ["llama", "gemma", "gemma2", "gemma3"])
def test_a_table_that_is_the_head_too_stays_one_and_narrow(family: str, tmp_path: Path):
    kind = FAMILIES[family]
    tied = replace(kind, changes={**kind.changes, "tie_word_embeddings": True})
    path = tied.save(tmp_path, torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    keep_narrow(model)
    table, head = model.get_input_embeddings().weight, model.lm_head.weight
    assert table is head
    assert table.dtype is torch.bfloat16


# Grouped heads, norms of heads, windows with a soft-cap and norms behind, scaled residuals.
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "granite"])
def test_an_engine_in_float32_leaves_the_weights_in_their_file(family: str, tmp_path: Path):
    path = str(FAMILIES[family].save(tmp_path, torch.bfloat16))
    settings = {"model_path": path, "dtype": "float32", "block_size": 4, "num_kv_blocks": 64}
    narrow = Engine(EngineConfig(**settings, max_num_batched_tokens=24))
    wide = Engine(EngineConfig(**settings, attention="torch"))
    assert narrow.spec == wide.spec
    assert narrow.memory.weights_bytes < 0.6 * wide.memory.weights_bytes
    prompts = {
        str(length): [token_id % 128 for token_id in random_prompt(length)]
        for length in (1, 20, 45)
    }
    for engine in (narrow, wide):
        for name, prompt in prompts.items():
            engine.add_request(make_request(name, prompt))
    assert tokens_by_request(run(narrow)) == tokens_by_request(run(wide))


def test_a_checkpoint_with_anything_else_is_no_bfloat16_checkpoint(tmp_path: Path):
    assert not is_all_bfloat16(tmp_path)
    assert not is_all_bfloat16(FAMILIES["llama"].save(tmp_path, torch.float32))
