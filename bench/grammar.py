"""What structured output costs: start, compile, mask, and a step of 16 rows with and without it.

`python -m bench.grammar [--path DIR] [--schemas DIR]`. `--schemas` compiles every *.json of a
directory and says which are refused, and why.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from engine.sampling.params import SamplingParams
from grammar.compiler import CompiledGrammar, GrammarCompiler
from grammar.grammar import Grammar, GrammarError, GrammarKind
from grammar.vocabulary import Vocabulary, load_vocabulary

T = TypeVar("T")

NUM_ROWS = 16
NUM_STEPS = 40
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 200},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["name", "tags", "address"],
}


def main() -> None:
    """Print the numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", default=".models/smollm2-135m-instruct")
    parser.add_argument("--schemas", type=Path)
    arguments = parser.parse_args()
    vocabulary = load_vocabulary(arguments.path)
    compiler, start_s = timed(lambda: GrammarCompiler(vocabulary))
    print(f"vocabulary of {vocabulary.vocab_size}: {start_s:.2f} s, once")
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(SCHEMA))
    compiled, compile_s = timed(lambda: compiler.compile(grammar))
    print(f"compile: {1e3 * compile_s:.1f} ms, once a grammar")
    print_masks(compiled, vocabulary)
    for file in sorted(arguments.schemas.glob("*.json")) if arguments.schemas else ():
        print_schema(file, compiler, vocabulary)
    print_steps(arguments.path, compiled)


def timed(action: Callable[[], T]) -> tuple[T, float]:
    """What it returned, and how long it took in seconds."""
    started_s = time.perf_counter()
    return action(), time.perf_counter() - started_s


def print_masks(compiled: CompiledGrammar, vocabulary: Vocabulary) -> None:
    """Times of the masks along random ways through a grammar."""
    times_s: list[float] = []
    for seed in range(20):
        rng, mask = random.Random(seed), compiled.new_mask()
        for _ in range(50):
            allowed, mask_s = timed(mask.allowed_tokens)
            times_s.append(mask_s)
            token_id = rng.choice(allowed.nonzero()[0].tolist())
            if token_id in vocabulary.eos_token_ids:
                break
            mask.advance([token_id])
    times_s.sort()
    print(
        f"  mask of one row: median {1e6 * statistics.median(times_s):.0f} us, "
        f"p99 {1e6 * times_s[int(0.99 * len(times_s))]:.0f} us, worst {1e3 * times_s[-1]:.1f} ms"
    )


def print_schema(file: Path, compiler: GrammarCompiler, vocabulary: Vocabulary) -> None:
    """One schema of a collection."""
    started_s = time.perf_counter()
    try:
        schema = json.dumps(json.loads(file.read_text()))
        compiled = compiler.compile(Grammar(kind=GrammarKind.JSON_SCHEMA, text=schema))
    except GrammarError as error:
        print(f"{file.name}: refused: {str(error)[:100]}")
        return
    print(f"{file.name}: {1e3 * (time.perf_counter() - started_s):.1f} ms")
    print_masks(compiled, vocabulary)


def print_steps(path: str, compiled: CompiledGrammar) -> None:
    """Steps of a full batch, three ways in turn, so that a busy machine disturbs all alike."""
    torch.set_num_threads(1)
    engine = Engine(EngineConfig(model_path=path, max_num_seqs=NUM_ROWS, num_kv_blocks=128))
    engine.warm_up()
    times_s: dict[str, list[float]] = {"greedy": [], "drawn": [], "drawn, with a grammar": []}
    for round_number in range(3):
        for kind, found in times_s.items():
            found.extend(step_times_s(engine, compiled, kind, round_number))
    plain_s = statistics.median(times_s["drawn"])
    for kind, found in times_s.items():
        median_s = statistics.median(found)
        print(f"step of {NUM_ROWS}, {kind}: {1e3 * median_s:.1f} ms, x {median_s / plain_s:.3f}")


def step_times_s(engine: Engine, compiled: CompiledGrammar, kind: str, seed: int) -> list[float]:
    """Seconds of each step after the prompts."""
    params = SamplingParams(
        max_tokens=NUM_STEPS, temperature=0.0 if kind == "greedy" else 1.0, seed=seed
    )
    for number in range(NUM_ROWS):
        request = Request(
            request_id=f"{kind}-{seed}-{number}",
            token_ids=list(range(100 + number, 120 + number)),
            num_prompt_tokens=20,
            sampling_params=params,
        )
        if "grammar" in kind:
            request.new_token_mask = compiled.new_mask
        engine.add_request(request)
    found: list[float] = []
    while engine.has_work():
        step, step_s = timed(engine.step)
        if step.stats.num_decodes == NUM_ROWS:
            found.append(step_s)
    return found


if __name__ == "__main__":
    main()
