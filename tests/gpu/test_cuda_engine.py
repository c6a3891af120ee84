"""The engine on a CUDA device: the same tokens as transformers' generate(), alone and batched."""

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from engine.sampling.params import SamplingParams
from tests.reference import generate_truth
from tests.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NUM_TOKENS = 16
PROMPTS = {f"len-{length}": list(range(3, 3 + length)) for length in (5, 31, 32, 33, 77)}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def engine(model_path: Path) -> Engine:
    return Engine(
        EngineConfig(
            model_path=str(model_path),
            dtype="float64",
            num_kv_blocks=64,
            max_num_batched_tokens=16,
            device="cuda",
        )
    )


def _serve(engine: Engine, names: list[str]) -> dict[str, tuple[int, ...]]:
    for name in names:
        engine.add_request(
            Request(
                request_id=name,
                token_ids=list(PROMPTS[name]),
                num_prompt_tokens=len(PROMPTS[name]),
                sampling_params=SamplingParams(
                    max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
                ),
            )
        )
    tokens: dict[str, tuple[int, ...]] = dict.fromkeys(names, ())
    while engine.has_work():
        for output in engine.step().outputs:
            tokens[output.request_id] += output.token_ids
    engine.check_integrity()
    return tokens


@pytest.mark.parametrize("is_batched", [False, True], ids=["alone", "batched"])
def test_tokens_are_those_of_generate(
    engine: Engine, model_path: Path, *, is_batched: bool
) -> None:
    truth = generate_truth(model_path, PROMPTS, num_tokens=NUM_TOKENS, dtype=torch.float64)
    groups = [list(PROMPTS)] if is_batched else [[name] for name in PROMPTS]
    for group in groups:
        for name, token_ids in _serve(engine, group).items():
            assert token_ids == truth[name].token_ids, name


def test_the_pool_lies_on_the_device(engine: Engine) -> None:
    assert engine.kv_cache.tensor.is_cuda
    assert engine.spec.device.startswith("cuda")
