"""What the sampler costs by itself: processor time of one batch of rows for each of its features.

    .venv/bin/python -m bench.sampler [--batch 16] [--vocab 49152] [--step-s 0.24]

One thread, logits of a normal distribution. The least of many runs counts: other load on the
machine can only add. `--step-s` is the processor time of a whole decode step of that batch without
any feature (bench.engine prints steps); it turns milliseconds into a share of the step.
"""

import argparse
import time
from types import SimpleNamespace
from typing import Any

import torch

from bench.engine import BASELINE, PROMPT_TOKENS, VARIANTS
from engine.request import Request
from engine.sampling.logprobs import token_logprobs
from engine.sampling.params import SamplingParams
from engine.sampling.rows import RowMaker
from engine.sampling.sampler import sample

NUM_OUTPUT_TOKENS = 12
NUM_RUNS = 30


def make_requests(params: dict[str, Any], batch: int) -> list[Request]:
    """Requests in the middle of their output."""
    requests = []
    for number in range(batch):
        num_tokens = PROMPT_TOKENS + NUM_OUTPUT_TOKENS
        requests.append(
            Request(
                request_id=str(number),
                token_ids=[3 + (number * 37 + place * 11) % 1000 for place in range(num_tokens)],
                num_prompt_tokens=PROMPT_TOKENS,
                sampling_params=SamplingParams(
                    max_tokens=2000, ignore_eos=True, seed=number, **params
                ),
            )
        )
    return requests


def measure_s(logits: torch.Tensor, requests: list[Request]) -> float:
    """Least processor time of making the rows, their tokens and the logprobs that are wanted."""
    runner: Any = SimpleNamespace(
        eos_token_ids=(2,), vocab_size=logits.shape[1], device=logits.device
    )
    maker = RowMaker(runner)
    times_s = []
    for _ in range(NUM_RUNS + 1):  # the first lays out what each request keeps
        started_s = time.thread_time()
        token_ids = sample(logits, [maker.make(request) for request in requests])
        num_logprobs = requests[0].sampling_params.num_logprobs
        if num_logprobs is not None:
            chosen = [token_id for token_id in token_ids if token_id is not None]
            token_logprobs(logits, chosen, [num_logprobs] * len(chosen))
        times_s.append(time.thread_time() - started_s)
    return min(times_s[1:])


def main() -> None:
    """Print a line for each feature."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", default=16, type=int)
    parser.add_argument("--vocab", default=49152, type=int)
    parser.add_argument("--step-s", default=None, type=float)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    logits = 3.0 * torch.randn(arguments.batch, arguments.vocab, generator=generator)
    base_s = 0.0
    for name, params in VARIANTS.items():
        own_s = measure_s(logits, make_requests(params, arguments.batch))
        base_s = own_s if name == BASELINE else base_s
        share = ""
        if arguments.step_s is not None:
            share = f"  adds {100 * (own_s - base_s) / arguments.step_s:.1f} % to a step"
        print(f"batch {arguments.batch:3}  {name:28} {1e3 * own_s:6.2f} ms{share}")


if __name__ == "__main__":
    main()
