"""How near the engine comes to what memory and arithmetic of this machine allow.

    .venv/bin/python -m bench.engine_limits [--threads 2] [--rounds 3] [--batches 1 16]

A decode step cannot take less than reading all weights and the KV of its requests once, a prompt no
less than its products. Each round measures the limit (a sum over memory that no cache holds, a
float32 product by torch) just before what is held against it, with the same threads. Counts weights
as models of Llama's kind have them.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from bench.engine import BASELINE, PROMPT_TOKENS, VARIANTS, measure
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from engine.sampling.params import SamplingParams

_READ_BYTES = 1 << 28
_SIDE = 1536  # of the matrices multiplied
_REPEATS = 3  # the best of them is the limit


def main() -> None:
    """Print one line for each limit and what is held against it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=".models/smollm2-135m-instruct", type=Path)
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--steps", default=24, type=int)
    parser.add_argument("--batches", default=[1, 16], type=int, nargs="+")
    parser.add_argument("--prompts", default=[2000], type=int, nargs="+")
    parser.add_argument("--threads", default=2, type=int)
    parser.add_argument("--attention", default="auto")
    arguments = parser.parse_args()
    engine = Engine(
        EngineConfig(
            model_path=str(arguments.model),
            num_threads=arguments.threads,
            max_num_seqs=max(arguments.batches),
            max_num_batched_tokens=max(arguments.prompts),
            max_model_len=2048,
            num_kv_blocks=1024,
            attention=arguments.attention,
        )
    )
    print(f"{arguments.model}, {engine.spec.dtype}, {arguments.threads} threads")
    for batch in arguments.batches:
        _compare_decode(engine, batch=batch, rounds=arguments.rounds, num_steps=arguments.steps)
    config = AutoConfig.from_pretrained(arguments.model).get_text_config()
    for num_tokens in arguments.prompts:
        _compare_prompt(engine, config, num_tokens=num_tokens, rounds=arguments.rounds)


def _compare_decode(engine: Engine, *, batch: int, rounds: int, num_steps: int) -> None:
    memory = torch.ones(_READ_BYTES // 4)
    context = PROMPT_TOKENS + 1 + num_steps / 2
    num_bytes = engine.memory.weights_bytes + batch * context * engine.spec.bytes_per_token
    params = VARIANTS[BASELINE]
    measure(engine, params, batch=batch, num_steps=1)  # lazy set-up
    limits, times = [], []
    for _ in range(rounds):
        limits.append(memory.nbytes / _best_s(memory.sum))
        pace = measure(engine, params, batch=batch, num_steps=num_steps)
        times.append(1 / pace.steps_per_s)
    shares = [num_bytes / limit / took for limit, took in zip(limits, times, strict=True)]
    print(
        f"batch {batch:3}   {num_bytes / 1e6:6.0f} MB a step, "
        f"{statistics.median(limits) / 1e9:5.1f} GB/s by a plain sum, "
        f"{statistics.median(times) * 1e3:7.1f} ms a step: {_spread(shares)} of the limit"
    )


def _compare_prompt(engine: Engine, config: Any, *, num_tokens: int, rounds: int) -> None:
    matrix = torch.rand(_SIDE, _SIDE, dtype=engine.spec.torch_dtype)
    num_flops = _prompt_flops(config, num_tokens)
    limits, times = [], []
    for number in range(rounds + 1):  # the first pays for memory and lazy set-up
        limits.append(2 * _SIDE**3 / _best_s(lambda: matrix @ matrix))
        times.append(_prompt_s(engine, num_tokens, salt=str(number)))
    shares = [num_flops / limit / took for limit, took in zip(limits, times, strict=True)][1:]
    print(
        f"prompt {num_tokens:4} {num_flops / 1e9:6.0f} GFLOP, "
        f"{statistics.median(limits) / 1e9:5.0f} GFLOP/s by torch, "
        f"{statistics.median(times[1:]) * 1e3:7.0f} ms: {_spread(shares)} of the limit"
    )


def _prompt_s(engine: Engine, num_tokens: int, *, salt: str) -> float:
    """Time to the first token of a prompt that nothing is cached of."""
    engine.add_request(
        Request(
            request_id=salt,
            token_ids=[3 + place * 11 % 1000 for place in range(num_tokens)],
            num_prompt_tokens=num_tokens,
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
            cache_salt=salt,
        )
    )
    started_at_s = time.perf_counter()
    while engine.has_work():
        engine.step()
    return time.perf_counter() - started_at_s


def _prompt_flops(config: Any, num_tokens: int) -> float:
    """Each weight of the layers with each token, and half a square of attention."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * head_dim
    kv_width = config.num_key_value_heads * head_dim
    num_weights = config.hidden_size * (2 * width + 2 * kv_width + 3 * config.intermediate_size)
    attention = 2 * num_tokens**2 * width
    return float(config.num_hidden_layers * (2 * num_weights * num_tokens + attention))


def _best_s(function: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        started_at_s = time.perf_counter()
        function()
        times.append(time.perf_counter() - started_at_s)
    return min(times)


def _spread(shares: list[float]) -> str:
    return f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"


if __name__ == "__main__":
    main()
