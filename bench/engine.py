"""What the sampler's features cost a decode step: steps per second without and with them.

    .venv/bin/python -m bench.engine [--rounds 3] [--steps 12] [--batches 1 16] [--model PATH]

One engine in this process. Each round times the same number of decode steps for every variant in
turn, greedy without any feature first; a ratio is taken within a round. Beside steps per second
stands the processor time of a step, which other load on the machine disturbs far less.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from engine.sampling.params import SamplingParams

PROMPT_TOKENS = 129  # with one token past a block, only that one is computed again in a later round
BASELINE = "greedy, nothing used"
VARIANTS: dict[str, dict[str, Any]] = {
    BASELINE: {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top-k, top-p, min-p": {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
    "three penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
    "bias, bad words, min_tokens": {
        "temperature": 0.0,
        "logit_bias": dict.fromkeys(range(100, 400), 1.0),
        "bad_words": tuple((token_id, token_id + 1) for token_id in range(100, 120)),
        "min_tokens": 1000,
        "stop_token_ids": (2,),
    },
    "allowed ids": {"temperature": 0.0, "allowed_token_ids": tuple(range(3, 10_000))},
    "5 logprobs": {"temperature": 0.0, "num_logprobs": 5},
}
VARIANTS["all of it"] = {name: value for each in VARIANTS.values() for name, value in each.items()}
VARIANTS["all of it"]["temperature"] = 1.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Decode steps of one variant in one round."""

    steps_per_s: float
    cpu_s: float  # processor time of one step, all threads


def measure(engine: Engine, params: dict[str, Any], *, batch: int, num_steps: int) -> Pace:
    """Time decode steps of `batch` requests at once, their prompts aside."""
    for number in range(batch):
        prompt = [3 + (number * 37 + place * 11) % 1000 for place in range(PROMPT_TOKENS)]
        engine.add_request(
            Request(
                request_id=str(number),
                token_ids=prompt,
                num_prompt_tokens=len(prompt),
                sampling_params=SamplingParams(
                    max_tokens=num_steps + 1000, ignore_eos=True, seed=number, **params
                ),
            )
        )
    while (stats := engine.step().stats).num_chunks or stats.num_decodes < batch:
        pass
    started_at_s, cpu_before_s = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        engine.step()
    duration_s = time.perf_counter() - started_at_s
    cpu_s = time.process_time() - cpu_before_s
    for number in range(batch):
        engine.abort(str(number))
    return Pace(num_steps / duration_s, cpu_s / num_steps)


def main() -> None:
    """Print a table for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=".models/smollm2-135m-instruct", type=Path)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--steps", default=12, type=int)
    parser.add_argument("--batches", default=[1, 16], type=int, nargs="+")
    parser.add_argument("--threads", default=None, type=int)
    arguments = parser.parse_args()
    engine = Engine(
        EngineConfig(
            model_path=str(arguments.model),
            dtype=arguments.dtype,
            num_threads=arguments.threads,
            max_num_seqs=max(arguments.batches),
            max_model_len=2048,
            num_kv_blocks=1024,
        )
    )
    print(f"{arguments.model}, {engine.spec.dtype}, {torch.get_num_threads()} threads")
    for batch in arguments.batches:
        _compare(engine, batch=batch, rounds=arguments.rounds, num_steps=arguments.steps)


def _compare(engine: Engine, *, batch: int, rounds: int, num_steps: int) -> None:
    paces: dict[str, list[Pace]] = {name: [] for name in VARIANTS}
    measure(engine, VARIANTS["all of it"], batch=batch, num_steps=1)  # lazy set-up
    for _ in range(rounds):
        for name, params in VARIANTS.items():
            paces[name].append(measure(engine, params, batch=batch, num_steps=num_steps))
    base = paces[BASELINE]
    for name, own in paces.items():
        ratios = [a.steps_per_s / b.steps_per_s for a, b in zip(own, base, strict=True)]
        cpu = [a.cpu_s / b.cpu_s for a, b in zip(own, base, strict=True)]
        median = statistics.median(each.steps_per_s for each in own)
        print(
            f"batch {batch:3}  {name:28} {median:7.2f} steps/s"
            f"  ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            f"  processor time {statistics.median(cpu):.3f} ({min(cpu):.3f} to {max(cpu):.3f})"
        )


if __name__ == "__main__":
    main()
