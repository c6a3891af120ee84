"""The same prompts and what one engine makes of them by itself."""

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from engine.sampling.params import SamplingParams
from tests.cluster_processes import ENGINE

PROMPT = [3 + (7 * number) % 300 for number in range(75)]
LONG_PROMPT = [3 + (11 * number) % 300 for number in range(400)]

_numbers = itertools.count()


def tokens_alone(
    model_path: Path, token_ids: Sequence[int], max_tokens: int, *, temperature: float = 0.0
) -> list[int]:
    """What one engine generates by itself."""
    return list(_generate(model_path, tuple(token_ids), max_tokens, temperature))


@functools.cache
def _engine(model_path: Path) -> Engine:
    return Engine(EngineConfig(model_path=str(model_path), model_id="tiny", **ENGINE))


@functools.cache
def _generate(
    model_path: Path, token_ids: tuple[int, ...], max_tokens: int, temperature: float
) -> tuple[int, ...]:
    engine, name = _engine(model_path), f"alone-{next(_numbers)}"
    engine.add_request(
        Request(
            request_id=name,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            sampling_params=SamplingParams(
                max_tokens=max_tokens, temperature=temperature, seed=5, ignore_eos=True
            ),
            cache_salt=name,  # nothing is cached of those before
        )
    )
    generated: list[int] = []
    while engine.has_work():
        for output in engine.step().outputs:
            assert output.error is None
            generated += output.token_ids
    return tuple(generated)
