"""The same prompts and what one engine makes of them by itself."""

from pathlib import Path

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from engine.sampling.params import SamplingParams
from tests.cluster_processes import ENGINE

PROMPT = [3 + (7 * number) % 300 for number in range(75)]
LONG_PROMPT = [3 + (11 * number) % 300 for number in range(400)]


def tokens_alone(
    model_path: Path, token_ids: list[int], max_tokens: int, *, temperature: float = 0.0
) -> list[int]:
    """What one engine generates by itself."""
    engine = Engine(EngineConfig(model_path=str(model_path), model_id="tiny", **ENGINE))
    engine.add_request(
        Request(
            request_id="alone",
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            sampling_params=SamplingParams(
                max_tokens=max_tokens, temperature=temperature, seed=5, ignore_eos=True
            ),
        )
    )
    generated: list[int] = []
    while engine.has_work():
        for output in engine.step().outputs:
            generated += output.token_ids
    return generated
