"""Where the time of a decode step goes, part by part.

    .venv/bin/python -m bench.step_profile [--threads 2] [--steps 16] [--batches 1 16]

Each moment of a step belongs to the innermost part that is known: an operation of the compiled
library, a verb of the engine, or what of the step is neither. The profiler makes small operations
and Python dearer: the table stands beside what a step takes without it.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from bench.engine import BASELINE, VARIANTS, Pace, measure
from engine import step
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model_runner import ModelRunner
from engine.native_attention import NativeAttention
from engine.sampling.rows import RowMaker
from engine.scheduler import Scheduler
from engine.step_runner import StepRunner

OPERATIONS = {
    "relevo::linears": "queries, keys, values",
    "relevo::gated_linear": "gate, up, activation",
    "relevo::widening_linear": "output, down",
    "relevo::paged_attention": "attention",
    "relevo::rms_norm": "norms",
    "relevo::rotary": "rotary embedding",
}
HEAD, STEP, REST = "head", "step", "in no part"
# Functions of the engine that are parts: of a class or a module, its name, the part.
VERBS: tuple[tuple[Any, str, str], ...] = (
    (Engine, "step", STEP),
    (Scheduler, "schedule", "scheduler"),
    (NativeAttention, "plan", "inputs"),
    (step, "build_batch", "inputs"),
    (ModelRunner, "forward", "the model's Python and small operations"),
    (RowMaker, "make", "sampling"),
    (step, "sample", "sampling"),
    (StepRunner, "_land", "results"),
)


def main() -> None:
    """Print a table for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=".models/smollm2-135m-instruct", type=Path)
    parser.add_argument("--threads", default=2, type=int)
    parser.add_argument("--steps", default=16, type=int)
    parser.add_argument("--batches", default=[1, 16], type=int, nargs="+")
    arguments = parser.parse_args()
    _name_verbs()
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
        parts = parts_of(run, vocab_size=engine.vocab_size)
        whole_s = sum(parts.values())
        print(
            f"batch {batch}, {arguments.threads} threads: {1e3 / bare.steps_per_s:.1f} ms a step, "
            f"{bare.cpu_s * 1e3:.1f} of processor time; under the profiler {whole_s * 1e3:.1f}:"
        )
        for part, seconds in sorted(parts.items(), key=lambda each: -each[1]):
            print(f"  {part:40} {seconds * 1e3:6.2f} ms {100 * seconds / whole_s:5.1f} %")
        known_s = whole_s - parts.get(REST, 0.0)
        print(f"  {'in parts':40} {known_s * 1e3:6.2f} ms {100 * known_s / whole_s:5.1f} %")


def parts_of(run: Callable[[], object], *, vocab_size: int) -> dict[str, float]:
    """Seconds of a step by part, over all steps that `run` makes."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        run()
    events = profiler.events()
    assert events is not None
    parts: dict[str, float] = defaultdict(float)
    num_steps = 0
    for event in events:
        num_steps += event.name == STEP
        if (part := _part_of(event, vocab_size)) is not None:
            parts[part] += event.self_cpu_time_total / 1e6
    parts[REST] = parts.pop(STEP)
    return {part: seconds / num_steps for part, seconds in parts.items()}


def _part_of(event: Any, vocab_size: int) -> str | None:
    """The innermost part around an event; None outside a step."""
    names = {part for _, _, part in VERBS}
    while event is not None:
        weight_shape = (event.input_shapes or [[], []])[1:2] or [[]]
        if event.name in OPERATIONS:
            is_head = vocab_size in weight_shape[0][:1]
            return HEAD if is_head else OPERATIONS[event.name]
        if event.name in names:
            return str(event.name)
        event = event.cpu_parent
    return None


def _name_verbs() -> None:
    """Let the profiler see the engine's verbs, in this process."""
    for owner, name, part in VERBS:
        named = _named(getattr(owner, name), part)
        is_bound = isinstance(vars(owner)[name], classmethod)
        setattr(owner, name, staticmethod(named) if is_bound else named)


def _named(verb: Callable[..., Any], part: str) -> Callable[..., Any]:
    @wraps(verb)
    def call(*arguments: Any, **keywords: Any) -> Any:
        with record_function(part):
            return verb(*arguments, **keywords)

    return call


if __name__ == "__main__":
    main()
