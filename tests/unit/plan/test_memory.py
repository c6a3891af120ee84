"""The memory that is planned is the memory that an engine then reports."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from plan.memory import CUDA_CONTEXT_BYTES, MemoryPlan, plan_memory
from plan.model_config import ModelConfig, read_model_config
from plan.parameters import count_parameters
from sim.devices import DEVICES, this_cpu
from tests.tiny_families import FAMILIES
from tests.unit.plan.configs import LLAMA_8B, engine_config, model_config

SMOLLM2 = Path(".models/smollm2-135m-instruct")
GEMMA = Path(".models/gemma-3-270m")


def planned(path: Path, engine: EngineConfig) -> MemoryPlan:
    config = read_model_config(path)
    return plan_memory(config, count_parameters(config), engine, this_cpu())


def check(engine: Engine, plan: MemoryPlan) -> None:
    """Each part within 5 %."""
    assert plan.dtype == engine.spec.dtype
    assert plan.max_model_len == engine.max_model_len
    assert plan.max_concurrency(plan.max_model_len) == engine.memory.max_concurrency
    for name in ("weights_bytes", "kv_bytes", "buffer_bytes"):
        assert getattr(plan, name) == pytest.approx(getattr(engine.memory, name), rel=0.05), name


TORCH = {"dtype": "bfloat16", "attention": "torch"}


@pytest.mark.parametrize(
    ("path", "changes"), [(SMOLLM2, {}), (SMOLLM2, TORCH), (GEMMA, {})], ids=str
)
def test_real_models_take_what_was_planned(path: Path, changes: dict[str, Any]) -> None:
    if not (path / "config.json").is_file():
        pytest.skip(f"no {path.name} here: `make setup gemma` makes both")
    # Few tokens to warm up with: emulated bfloat16 is slow.
    config = EngineConfig(
        model_path=str(path), num_threads=1, max_num_batched_tokens=8, max_num_seqs=4, **changes
    )
    engine = Engine(config)
    if config.attention == "torch":
        engine.warm_up()  # which gathers blocks
    check(engine, planned(path, config))


@pytest.mark.parametrize("name", ["deepseek v3", "gpt-neox", "gemma3", "qwen3 moe"])
def test_tiny_models_of_other_shapes_do_too(tmp_path: Path, name: str) -> None:
    path = FAMILIES[name].save(tmp_path)
    config = EngineConfig(
        model_path=str(path),
        block_size=8,
        max_num_seqs=3,
        max_model_len=64,
        dtype="float32",
        attention="torch",
    )
    engine = Engine(config)
    engine.warm_up()
    plan = planned(path, config)
    check(engine, plan)
    assert plan.kv_bytes_per_token == engine.spec.bytes_per_token
    assert plan.weights_bytes == engine.memory.weights_bytes


def memory(config: ModelConfig, device: str = "h100", **changes: Any) -> MemoryPlan:
    engine = engine_config(**changes)
    return plan_memory(config, count_parameters(config), engine, DEVICES[device])


def test_a_gpu_holds_weights_and_the_engines_share_of_the_rest() -> None:
    plan = memory(model_config(), max_num_seqs=256)
    assert plan.weights_bytes == 2 * 8_030_261_248
    assert plan.kv_bytes_per_token == 131_072
    free = DEVICES["h100"].num_bytes - CUDA_CONTEXT_BYTES - plan.weights_bytes
    assert 0.84 * free < plan.kv_bytes <= 0.85 * free
    assert plan.num_fitting(131_072) == plan.num_blocks // 4096
    # Longer requests, fewer of them.
    fitting = [plan.num_fitting(length) for length in (1024, 4096, 8192, 32_768, 131_072)]
    assert fitting == sorted(fitting, reverse=True)


def test_a_window_frees_no_blocks() -> None:
    windowed = model_config({**LLAMA_8B, "model_type": "mistral", "sliding_window": 4096})
    assert memory(windowed).kv_bytes_per_token == memory(model_config()).kv_bytes_per_token


def test_the_pool_is_no_larger_than_requests_can_use_or_a_person_said() -> None:
    assert memory(model_config(), max_num_seqs=2, max_model_len=1000).num_blocks == 2 * 32
    assert memory(model_config(), num_kv_blocks=99).num_blocks == 99
    assert memory(model_config(), num_kv_blocks=99).max_model_len == 99 * 32


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"do not fit the 85\.0 GB of one device"):
        memory(model_config(num_hidden_layers=400))
    with pytest.raises(ValueError, match="at most 131072"):
        memory(model_config(), max_model_len=200_000)
    with pytest.raises(ValueError, match="got dtype 'float8'"):
        memory(model_config(torch_dtype="float8"))


def test_an_old_name_of_a_rope_limits_the_length_too() -> None:
    for kind in ("longrope", "su"):
        rope = {"type": kind, "original_max_position_embeddings": 4096}
        assert memory(model_config(rope_scaling=rope)).max_model_len == 4096


def test_a_file_that_is_no_configuration_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*config\.json"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="expected an object"):
        read_model_config(tmp_path / "config.json")
