"""What a device's engine reaches of what the device can: decode by bytes, prefill by arithmetic.

    .venv/bin/python -m bench.gpu [--model PATH] [--batches 1 16 64] [--context 1024] [--dry]

Both ceilings are measured here and now: a copy of a large tensor, bytes read and written, and a
product of two large square ones in the model's dtype. A decode step reads every weight once and
the KV of its requests; a prompt costs two operations a weight and token, and attention. `--dry`
does all of it in small, on a CPU too: the numbers mean nothing then.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from engine.sampling.params import SamplingParams

VARIANTS: dict[str, dict[str, Any]] = {
    "as it serves": {},
    "without graphs": {"cuda_graphs": False},
    "nothing ahead": {"run_ahead": False},
    "gathered": {"attention": "torch"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What the device does at best, measured."""

    bytes_per_s: float
    flops: float


def measure_ceilings(device: torch.device, dtype: torch.dtype, *, side: int) -> Ceilings:
    """The best of some copies, and of some products, of [side, side]."""
    generator = torch.Generator(device).manual_seed(0)
    # Not zeros: they multiply faster than numbers do.
    left, right = (
        torch.randn(side, side, device=device, generator=generator).to(dtype) for _ in range(2)
    )
    target = torch.empty_like(left.repeat(4, 1))
    source = left.repeat(4, 1)
    copy_s = _best_s(device, lambda: target.copy_(source))
    product_s = _best_s(device, lambda: torch.mm(left, right))
    return Ceilings(bytes_per_s=2 * source.nbytes / copy_s, flops=2 * side**3 / product_s)


def _best_s(device: torch.device, run: Callable[[], object], rounds: int = 8) -> float:
    durations = []
    for _ in range(rounds):
        _synchronize(device)
        started_s = time.perf_counter()
        run()
        _synchronize(device)
        durations.append(time.perf_counter() - started_s)
    return min(durations[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _add(engine: Engine, name: str, num_prompt_tokens: int, num_tokens: int) -> None:
    offset = hash(name) % 997
    token_ids = [(offset + 31 * place) % engine.vocab_size for place in range(num_prompt_tokens)]
    engine.add_request(
        Request(
            request_id=name,
            token_ids=token_ids,
            num_prompt_tokens=num_prompt_tokens,
            sampling_params=SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
            cache_salt=f"{name}-{time.monotonic_ns()}",
        )
    )


def decode_step_s(engine: Engine, *, batch: int, context: int, num_steps: int) -> float:
    """Median seconds of a step of `batch` requests with about `context` tokens each."""
    for number in range(batch):
        _add(engine, f"decode-{number}", context, num_steps + 100)
    while engine.step().stats.num_decodes < batch:
        pass
    durations = []
    for _ in range(num_steps):
        started_s = time.perf_counter()
        engine.step()
        durations.append(time.perf_counter() - started_s)
    for number in range(batch):
        engine.abort(f"decode-{number}")
    while engine.has_work():
        engine.step()
    return statistics.median(durations)


def prefill_s(engine: Engine, num_tokens: int) -> float:
    """Seconds from a prompt's arrival to its first token."""
    _add(engine, "prefill", num_tokens, 1)
    started_s = time.perf_counter()
    while engine.has_work():
        engine.step()
    return time.perf_counter() - started_s


def show(engine: Engine, name: str, ceilings: Ceilings, options: argparse.Namespace) -> None:
    """One line for each batch, and one for the prompt."""
    weights_bytes, kv_bytes = engine.memory.weights_bytes, engine.spec.bytes_per_token
    for batch in options.batches:
        step_s = decode_step_s(
            engine, batch=batch, context=options.context, num_steps=options.steps
        )
        rate = (weights_bytes + batch * options.context * kv_bytes) / step_s
        print(
            f"{name:16} decode of {batch:4}: {1e3 * step_s:8.3f} ms a step, {rate / 1e9:8.1f} GB/s,"
            f" {100 * rate / ceilings.bytes_per_s:5.1f} % of a copy"
        )
    prefill_s(engine, options.context)
    seconds = min(prefill_s(engine, options.context) for _ in range(3))
    num_weights = weights_bytes / engine.spec.torch_dtype.itemsize
    rate = 2 * num_weights * options.context / seconds
    print(
        f"{name:16} prompt of {options.context:4}: {1e3 * seconds:8.3f} ms,"
        f" {rate / 1e12:10.2f} TFLOP/s, {100 * rate / ceilings.flops:5.1f} % of a product"
    )


def main(argv: list[str] | None = None) -> None:
    """Measure the ceilings, then an engine of each variant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default=".models/smollm2-135m-instruct", type=Path)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--block-size", default=256, type=int, help="FlashAttention 2 wants 256")
    parser.add_argument("--batches", default=[1, 16, 64], type=int, nargs="+")
    parser.add_argument("--context", default=1024, type=int)
    parser.add_argument("--steps", default=50, type=int)
    parser.add_argument("--variants", default=list(VARIANTS), nargs="+", choices=list(VARIANTS))
    parser.add_argument("--dry", action="store_true", help="everything in small, on a CPU too")
    options = parser.parse_args(argv)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.dry:
        print("skipped: no CUDA device here (--dry shows the form on a CPU)")
        return
    if options.dry:
        options.batches, options.context, options.steps, options.block_size = [1, 2], 40, 3, 8
    for name in options.variants:
        engine = Engine(
            EngineConfig(
                model_path=str(options.model),
                dtype=options.dtype,
                block_size=options.block_size,
                max_model_len=options.context + options.steps + 128,
                max_num_seqs=max(options.batches),
                max_num_batched_tokens=max(512, *options.batches),
                **VARIANTS[name],
            )
        )
        engine.warm_up()
        if name == options.variants[0]:
            side = 256 if options.dry else 8192
            ceilings = measure_ceilings(device, engine.spec.torch_dtype, side=side)
            print(
                f"{options.model} in {engine.spec.dtype} on {engine.spec.device}:"
                f" copy {ceilings.bytes_per_s / 1e9:.1f} GB/s,"
                f" product {ceilings.flops / 1e12:.2f} TFLOP/s"
            )
        show(engine, name, ceilings, options)


if __name__ == "__main__":
    main()
