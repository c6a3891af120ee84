"""What the bench times on an engine is what it says it timed."""

import itertools

import pytest

from bench.sim_hardware import Step, fit, time_batch, time_prompt
from engine.config import EngineConfig
from engine.engine import Engine
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    model = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    return Engine(
        EngineConfig(
            model_path=str(model),
            dtype="float32",
            num_threads=1,
            max_num_seqs=4,
            max_model_len=256,
            max_num_batched_tokens=64,
            num_kv_blocks=128,
        )
    )


def test_a_prompt_of_several_steps_is_timed_to_its_end(engine: Engine) -> None:
    steps = list(time_prompt(engine, 150, salt=1))
    assert len(steps) >= 3
    assert sum(step.num_tokens for step in steps) == 150
    done = 0
    for step in steps:
        assert step.num_pairs == step.num_tokens * done + step.num_tokens**2 // 2
        done += step.num_tokens
    # The next one is not mixed up with what is left of it.
    assert not engine.has_work()
    assert sum(step.num_tokens for step in time_prompt(engine, 32, salt=2)) == 32


def test_streams_are_timed_with_the_kv_they_have(engine: Engine) -> None:
    steps = list(time_batch(engine, 3, 60))
    assert {(step.num_decodes, step.num_tokens) for step in steps} == {(3, 3)}
    kv_tokens = [step.num_kv_tokens for step in steps]
    assert kv_tokens[0] > 3 * 60
    assert {after - before for before, after in itertools.pairwise(kv_tokens)} == {3}


def test_the_parts_of_a_step_are_found_again() -> None:
    def step(num_tokens: int, num_pairs: int, num_decodes: int, num_kv_tokens: int) -> Step:
        duration_s = 0.01 + 1e-4 * num_tokens + 2e-3 * num_decodes + 1e-6 * num_kv_tokens
        return Step(
            num_tokens=num_tokens,
            num_pairs=num_pairs,
            num_decodes=num_decodes,
            num_kv_tokens=num_kv_tokens,
            duration_s=duration_s,
        )

    prompts = [step(n, n * n // 2, 0, 0) for n in (32, 128, 512)]
    decodes = [step(n, 0, n, n * kv) for n in (1, 4, 16) for kv in (64, 512)]
    found = fit([*prompts, *decodes])
    assert found["fixed_s"] == pytest.approx(0.01)
    assert found["token_s"] == pytest.approx(1e-4)
    assert found["request_s"] == pytest.approx(2e-3)
    assert found["kv_token_s"] == pytest.approx(1e-6)
    assert found["attention_s"] == pytest.approx(0.0, abs=1e-12)
