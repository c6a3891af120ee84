"""A tiny model in float64 and engines on it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request, RequestOutput
from engine.sampling.params import SamplingParams
from tests.tiny_model import make_tiny_model

BLOCK_SIZE = 8


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def make_engine(tiny_model: Path) -> Iterator[Callable[..., Engine]]:
    """Make engines; when the test is over the books of each must agree."""
    made: list[Engine] = []

    def make(**changes: Any) -> Engine:
        settings: dict[str, Any] = {
            "model_path": str(tiny_model),
            "model_id": "tiny",
            "block_size": BLOCK_SIZE,
            "num_kv_blocks": 64,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
        }
        made.append(Engine(EngineConfig(**{**settings, **changes})))
        return made[-1]

    yield make
    for engine in made:
        engine.check_integrity()
        counts = engine.block_counts()
        states = (counts.free, counts.cached, counts.used, counts.held, counts.quarantined)
        assert sum(states) == counts.total


def make_request(
    request_id: str, token_ids: list[int], *, max_tokens: int = 12, **changes: Any
) -> Request:
    names = {
        "cache_salt",
        "choice_index",
        "hand_over",
        "new_token_mask",
        "num_choices",
        "num_prompt_tokens",
        "priority",
        "request_label",
    }
    own = {name: changes.pop(name) for name in names & set(changes)}
    params: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, **changes}
    return Request(
        request_id=request_id,
        token_ids=list(token_ids),
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
        **{"num_prompt_tokens": len(token_ids), **own},
    )


def run(engine: Engine) -> list[RequestOutput]:
    """All outputs until the engine has nothing left to do."""
    outputs: list[RequestOutput] = []
    for _ in range(10_000):
        if not engine.has_work():
            break
        step = engine.step()
        outputs += step.outputs
        if not step.stats.num_tokens and not step.stats.num_preemptions:
            break
    return outputs


def tokens_by_request(outputs: list[RequestOutput]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for output in outputs:
        tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


def tokens_by_choice(outputs: list[RequestOutput], request_id: str) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for output in outputs:
        if output.request_id == request_id:
            tokens.setdefault(output.choice_index, []).extend(output.token_ids)
    return tokens


def generate(engine: Engine, request: Request) -> list[int]:
    engine.add_request(request)
    return tokens_by_request(run(engine))[request.request_id]


def random_prompt(length: int, *, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return [int(i) for i in torch.randint(3, 320, (length,), generator=generator)]
