"""Where the time of a decode step goes, part by part.

    .venv/bin/python -m bench.step_profile [--threads 1] [--steps 8] [--batches 1 16]

Every torch operation belongs to one part; what is in none (Python, the scheduler, calls of modules)
is the rest of the step, so the parts are the whole of it. The profiler itself makes small
operations and Python dearer: beside it stands what a step takes without it.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from bench.engine import BASELINE, VARIANTS, Pace, measure
from engine.config import EngineConfig
from engine.engine import Engine

PARTS = {
    "relevo::linears": "queries, keys, values",
    "relevo::gated_linear": "gate, up, activation",
    "relevo::widening_linear": "output, down",
    "aten::linear": "products by torch",
    "relevo::paged_attention": "attention",
    "relevo::rms_norm": "norms",
    "relevo::rotary": "rotary embedding",
    "aten::add": "residuals",
}
HEAD, OTHERS, REST = "head", "other operations", "Python and calls"


def parts_of(run: Callable[[], Pace], *, vocab_size: int) -> tuple[dict[str, float], float]:
    """Seconds by part over all that `run` does, and how many those are; the run tells its pace."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        run()
    parts: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages(group_by_input_shape=True):
        weight_shape = (event.input_shapes or [[], []])[1:2] or [[]]
        is_head = event.key == "relevo::widening_linear" and vocab_size in weight_shape[0][:1]
        part = HEAD if is_head else PARTS.get(event.key, OTHERS)
        parts[part] += event.self_cpu_time_total / 1e6
    events = profiler.events()
    assert events is not None
    whole_us = max(e.time_range.end for e in events) - min(e.time_range.start for e in events)
    whole_s = whole_us / 1e6
    parts[REST] = whole_s - sum(parts.values())
    return dict(parts), whole_s


def main() -> None:
    """Print a table for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=".models/smollm2-135m-instruct", type=Path)
    parser.add_argument("--threads", default=1, type=int)
    parser.add_argument("--steps", default=8, type=int)
    parser.add_argument("--batches", default=[1, 16], type=int, nargs="+")
    arguments = parser.parse_args()
    engine = Engine(
        EngineConfig(
            model_path=str(arguments.model),
            num_threads=arguments.threads,
            max_num_seqs=max(arguments.batches),
            num_kv_blocks=256,
            max_model_len=2048,
        )
    )
    for batch in arguments.batches:

        def run(batch: int = batch, num_steps: int = arguments.steps) -> Pace:
            return measure(engine, VARIANTS[BASELINE], batch=batch, num_steps=num_steps)

        run()
        bare = run()
        parts, whole_s = parts_of(run, vocab_size=engine.vocab_size)
        print(
            f"batch {batch}, {arguments.threads} threads: {1e3 / bare.steps_per_s:.1f} ms a step, "
            f"{bare.cpu_s * 1e3:.1f} of processor time; shares under the profiler:"
        )
        for part, seconds in sorted(parts.items(), key=lambda each: -each[1]):
            print(f"  {part:24} {100 * seconds / whole_s:5.1f} %")


if __name__ == "__main__":
    main()
