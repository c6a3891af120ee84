"""Measures this machine's engine for the simulator: a JSON file for `relevo sim --hardware`.

    .venv/bin/python -m bench.sim_hardware [--model PATH] [--output hardware.json]

Times the engine's steps, prompts of several lengths and decodes of several batches, and fits what a
step is made of in `sim/hardware.py`: a fixed cost, each token, each (token, earlier token) pair,
each request, each token of KV read. What cannot be told apart here counts as 0.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from engine.config import EngineConfig
from engine.engine import Engine
from engine.load import StepOutput
from engine.request import Request
from engine.sampling.params import SamplingParams

PROMPT_TOKENS = (32, 128, 512, 1024)
BATCHES = (1, 2, 4, 8, 16)
DECODE_STEPS = 6
LINK_BYTES_PER_S = 1e9  # of shared memory on one host; see bench/kv_transfer.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One timed step."""

    num_tokens: int
    num_pairs: int
    num_decodes: int
    num_kv_tokens: int
    duration_s: float


def main() -> None:
    """Measure, fit, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=".models/smollm2-135m-instruct", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", default=None, type=int)
    parser.add_argument("--output", default=Path("hardware.json"), type=Path)
    arguments = parser.parse_args()
    engine = Engine(
        EngineConfig(
            model_path=str(arguments.model),
            dtype=arguments.dtype,
            num_threads=arguments.threads,
            max_num_seqs=max(BATCHES),
            max_model_len=2048,
            max_num_batched_tokens=max(PROMPT_TOKENS),
            num_kv_blocks=1024,
        )
    )
    _time_step(engine)  # lazy set-up
    steps = [*_time_prompts(engine), *_time_decodes(engine)]
    hardware = fit(steps)
    hardware |= {
        "num_kv_tokens": 1024 * engine.config.block_size,
        "kv_bytes_per_token": engine.spec.bytes_per_token,
        "link_bytes_per_s": LINK_BYTES_PER_S,
        "max_num_seqs": engine.config.max_num_seqs,
        "max_num_batched_tokens": engine.config.max_num_batched_tokens,
    }
    arguments.output.write_bytes(orjson.dumps(hardware, option=orjson.OPT_INDENT_2) + b"\n")
    print(f"{len(steps)} steps, written to {arguments.output}")
    for name, value in hardware.items():
        print(f"{name:24} {value:.3g}")


def fit(steps: list[Step]) -> dict[str, float]:
    """Least squares of the step's parts, none of them negative."""
    names = ("fixed_s", "token_s", "attention_s", "request_s", "kv_token_s")
    parts = np.array(
        [[1, s.num_tokens, s.num_pairs, s.num_decodes, s.num_kv_tokens] for s in steps]
    )
    durations_s = np.array([step.duration_s for step in steps])
    # Relative errors: a long step must not count for more than a short one.
    weights = 1.0 / durations_s
    kept = list(range(len(names)))
    while True:
        values, *_ = np.linalg.lstsq(parts[:, kept] * weights[:, None], durations_s * weights)
        if values.min() >= 0.0:
            break
        del kept[int(values.argmin())]
    fitted = dict.fromkeys(names, 0.0) | {
        names[n]: float(v) for n, v in zip(kept, values, strict=True)
    }
    return {**fitted, "weights_s": 0.0}  # within the fixed cost


def _time_prompts(engine: Engine) -> list[Step]:
    return [
        step
        for salt, num_tokens in enumerate(PROMPT_TOKENS * 3)
        for step in time_prompt(engine, num_tokens, salt=salt)
    ]


def time_prompt(engine: Engine, num_tokens: int, *, salt: int) -> Iterator[Step]:
    """Its steps: more than one where a step may not take long enough for all of it."""
    _add(engine, "prompt", num_tokens, salt=salt, max_tokens=1)
    num_computed = 0
    while num_computed < num_tokens:
        output, duration_s = _time_step(engine)
        num_new = output.stats.num_tokens
        assert num_new, "nothing was computed of a prompt that nothing stands before"
        yield Step(
            num_tokens=num_new,
            num_pairs=num_new * num_computed + num_new * num_new // 2,
            num_decodes=0,
            num_kv_tokens=0,
            duration_s=duration_s,
        )
        num_computed += num_new


def _time_decodes(engine: Engine) -> list[Step]:
    return [
        step
        for num_prompt in (64, 512)
        for batch in BATCHES
        for step in time_batch(engine, batch, num_prompt)
    ]


def time_batch(engine: Engine, batch: int, num_prompt: int) -> Iterator[Step]:
    """Steps in which so many requests decode, after prompts of that length."""
    for number in range(batch):
        _add(engine, str(number), num_prompt, salt=1000 + number, max_tokens=1000)
    while engine.step().stats.num_decodes < batch:
        pass
    for _ in range(DECODE_STEPS):
        output, duration_s = _time_step(engine)
        yield Step(
            num_tokens=batch,
            num_pairs=0,
            num_decodes=batch,
            # Those whose prompts were done sooner have more tokens by now.
            num_kv_tokens=sum(each.num_computed_tokens for each in output.outputs),
            duration_s=duration_s,
        )
    for number in range(batch):
        engine.abort(str(number))


def _add(engine: Engine, request_id: str, num_tokens: int, *, salt: int, max_tokens: int) -> None:
    engine.add_request(
        Request(
            request_id=request_id,
            token_ids=[(salt * 37 + place * 11) % engine.vocab_size for place in range(num_tokens)],
            num_prompt_tokens=num_tokens,
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0),
            cache_salt=str(salt),
        )
    )


def _time_step(engine: Engine) -> tuple[StepOutput, float]:
    start_s = time.perf_counter()
    output = engine.step()
    return output, time.perf_counter() - start_s


if __name__ == "__main__":
    main()
