"""A made-up trace of the shape of the recorded ones: system prompts, sessions that grow, noise.

Each session begins with one of a few system prompts and comes back some seconds later with all it
had before and a new turn. Lengths are log-normal, arrivals random. The same seed gives the same.
"""

import itertools
import math
import random
from dataclasses import dataclass

from sim.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the made-up requests are like."""

    num_requests: int = 2000
    rate: float = 10.0  # requests per second
    num_system_prompts: int = 8
    system_tokens: int = 1024
    turn_tokens: float = 3000.0  # median of what a turn adds
    turn_spread: float = 1.1  # sigma of its logarithm
    output_tokens: float = 200.0
    output_spread: float = 0.9
    return_share: float = 0.5  # of the requests that have a later one in their session
    return_s: float = 20.0  # mean time until it
    max_tokens: int = 100_000
    block_tokens: int = 512


def make_trace(shape: Shape, *, seed: int) -> Trace:
    """Sessions, one after the other, until there are enough requests."""
    rng = random.Random(seed)
    numbers = itertools.count(shape.num_system_prompts * 1000)
    requests: list[TraceRequest] = []
    # Sessions come and turns of older ones return, together at the asked rate.
    session_rate = shape.rate * (1.0 - shape.return_share)
    started_s = 0.0
    while started_s * shape.rate < shape.num_requests or len(requests) < shape.num_requests:
        requests += _make_session(shape, started_s, rng, numbers)
        started_s += rng.expovariate(session_rate)
    requests.sort(key=lambda each: each.arrived_s)
    return Trace(
        name=f"synthetic-{seed}",
        requests=requests[: shape.num_requests],
        block_tokens=shape.block_tokens,
    )


def _make_session(
    shape: Shape, started_s: float, rng: random.Random, numbers: "itertools.count[int]"
) -> list[TraceRequest]:
    # Few system prompts are popular, many are not.
    system = min(int(rng.expovariate(0.7)), shape.num_system_prompts - 1)
    block_ids = [system * 1000 + n for n in range(shape.system_tokens // shape.block_tokens)]
    num_tokens, arrived_s = shape.system_tokens, started_s
    turns: list[TraceRequest] = []
    while True:
        num_tokens += max(int(rng.lognormvariate(_log(shape.turn_tokens), shape.turn_spread)), 8)
        if turns and num_tokens > shape.max_tokens:
            return turns
        num_tokens = min(num_tokens, shape.max_tokens)
        num_output = int(rng.lognormvariate(_log(shape.output_tokens), shape.output_spread))
        num_blocks = -(-num_tokens // shape.block_tokens)
        # The last block of the turn before was not full, so its name is another one now.
        num_kept = turns[-1].num_prompt_tokens // shape.block_tokens if turns else len(block_ids)
        block_ids = block_ids[:num_kept]
        block_ids += itertools.islice(numbers, num_blocks - num_kept)
        turns.append(
            TraceRequest(
                arrived_s=arrived_s,
                num_prompt_tokens=num_tokens,
                num_output_tokens=min(max(num_output, 1), 2000),
                block_ids=tuple(block_ids),
            )
        )
        if rng.random() >= shape.return_share:
            return turns
        num_tokens += num_output
        arrived_s += rng.expovariate(1.0 / shape.return_s)


def _log(median: float) -> float:
    return math.log(median)
