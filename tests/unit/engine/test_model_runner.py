"""What a runner makes of its configuration and its model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.engine import Engine
from tests.tiny_families import Family
from tests.unit.engine.conftest import make_request, random_prompt, run, tokens_by_request


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_long_neighbour_does_not_change_the_rope_of_a_short_request(tmp_path: Path, kind: str):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
        rope |= {**factors, "original_max_position_embeddings": 64}
    changes = {"rope_parameters": rope, "max_position_embeddings": 64}
    path = Family("Llama", changes).save(tmp_path)
    engine = Engine(EngineConfig(model_path=str(path), block_size=4, num_kv_blocks=64))
    assert engine.max_model_len == 64
    short, long = random_prompt(9), random_prompt(55)
    prompts = {"short": [i % 128 for i in short], "long": [i % 128 for i in long]}
    for name, prompt in prompts.items():
        # Both reach the original length, which neither may pass.
        engine.add_request(make_request(name, prompt, max_tokens=64 - len(prompt)))
    tokens = tokens_by_request(run(engine))
    reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    for name, prompt in prompts.items():
        output = reference.generate(
            torch.tensor([prompt]), max_new_tokens=64 - len(prompt), do_sample=False
        )
        assert tokens[name] == output[0, len(prompt) :].tolist()
    with pytest.raises(ValueError, match="fewer than 64"):
        engine.add_request(make_request("too long", [5] * 64, max_tokens=1))


def test_rope_that_depends_on_neighbours_is_limited_to_its_original_length(tmp_path: Path):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    }
    path = Family("Llama", {"rope_parameters": rope}).save(tmp_path)
    assert Engine(EngineConfig(model_path=str(path), num_kv_blocks=99)).max_model_len == 64
    with pytest.raises(ValueError, match=r"at most 64: .*longrope"):
        Engine(EngineConfig(model_path=str(path), num_kv_blocks=99, max_model_len=65))


def test_a_directory_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"model_path|config\.json"):
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
        {"attention": "fast"},
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


def test_the_memory_report_counts_what_is_there(
    make_engine: Callable[..., Engine], tiny_model: Path
):
    engine = make_engine(max_model_len=50, attention="torch")  # which gathers into buffers
    report = engine.memory
    weights = load_file(tiny_model / "model.safetensors")
    assert report.weights_bytes == sum(tensor.nbytes for tensor in weights.values())
    assert report.kv_bytes == engine.kv_cache.tensor.nbytes == 64 * engine.spec.bytes_per_block
    assert report.max_concurrency == 64 // 7
    engine.warm_up()
    assert engine.memory.buffer_bytes > report.buffer_bytes > 0
    assert "maximum concurrency at 50 tokens per request: 9" in str(engine.memory)


def test_weights_stored_in_the_dtype_of_the_engine_stay_in_the_file(
    make_engine: Callable[..., Engine], tiny_model: Path
):
    engines = [make_engine(), make_engine()]
    mappings = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if str(tiny_model) in line
    ]
    starts = [int(line.split("-")[0], 16) for line in mappings]
    ends = [int(line.split()[0].split("-")[1], 16) for line in mappings]
    for engine in engines:
        for parameter in engine._runner._model.parameters():
            address = parameter.data_ptr()
            assert any(start <= address < end for start, end in zip(starts, ends, strict=True))
