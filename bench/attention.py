"""What the compiled attention and weights that stay narrow buy: steps with them against torch's.

    .venv/bin/python -m bench.attention [--rounds 3] [--steps 6] [--batches 1 8] [--threads 1]

Two engines in this process, in turns; a ratio is taken within a round. Greedy decode steps.
"""

import argparse
import statistics
from pathlib import Path

from bench.engine import BASELINE, VARIANTS, measure
from engine.config import EngineConfig
from engine.engine import Engine


def main() -> None:
    """Print one line for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=".models/smollm2-135m-instruct", type=Path)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--steps", default=6, type=int)
    parser.add_argument("--batches", default=[1, 8], type=int, nargs="+")
    parser.add_argument("--threads", default=1, type=int)
    arguments = parser.parse_args()
    native, torch = (
        Engine(
            EngineConfig(
                model_path=str(arguments.model),
                dtype=arguments.dtype,
                num_threads=arguments.threads,
                max_num_seqs=max(arguments.batches),
                num_kv_blocks=128,
                attention=attention,
            )
        )
        for attention in ("native", "torch")
    )
    print(f"{arguments.model}, {native.spec.dtype}, {arguments.threads} threads")
    for batch in arguments.batches:
        ratios = []
        for _ in range(arguments.rounds):
            own, base = (
                measure(engine, VARIANTS[BASELINE], batch=batch, num_steps=arguments.steps).cpu_s
                for engine in (native, torch)
            )
            ratios.append(base / own)
        print(
            f"batch {batch:3}  last round: {own * 1e3:.0f} ms of processor time a step against "
            f"{base * 1e3:.0f}, faster {statistics.median(ratios):.2f} times "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
