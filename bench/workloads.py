"""The five pieces of work that servers are compared by; prompts of one round are the same to all.

W1  one stream, 128 in, 128 out
W2  16 at once, 256 in, 64 out, distinct prompts
W3  16 at once, 1,024 shared and 32 own tokens in, 32 out, the shared ones computed before
W4  one prompt of 2,000, 1 out
W5  8 streams of 64 in, 256 out; meanwhile a prompt of 1,000 comes every 4 s

All greedy, and no answer ends before its length.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from load_generator.client import Client
from load_generator.outcome import Outcome
from load_generator.percentiles import Values
from load_generator.plan import body_of
from load_generator.planned_request import PlannedRequest
from load_generator.prompts import PromptMaker
from load_generator.run import Sender

TOKEN_IDS = (1000, 30000)  # ordinary words of the vocabularies in use
W5_PAUSE_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How to ask one server."""

    client: Client
    model: str
    prompts: str
    extra_body: dict[str, Any]

    def maker(self) -> PromptMaker:
        """Makes prompts in the form it takes."""
        return PromptMaker(self.prompts, TOKEN_IDS)

    def request(self, tokens: Sequence[Any], num_output_tokens: int) -> PlannedRequest:
        """One request of these tokens."""
        fields = {
            "model": self.model,
            **self.maker().fields(tokens),
            "max_tokens": num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return PlannedRequest(
            due_s=0.0,
            body=body_of(fields, self.extra_body),
            num_prompt_tokens=len(tokens),
            num_output_tokens=num_output_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one server did with one piece of work, once."""

    numbers: dict[str, float]
    prompt_tokens: tuple[int, ...]  # as the server counted
    output_tokens: tuple[int, ...]
    wrong: str = ""  # what was not as asked for


async def measure(name: str, asking: Asking, rng: random.Random, *, scale: float = 1.0) -> Measured:
    """Have it done; `scale` makes it smaller."""

    def size(num_tokens: int) -> int:
        return max(round(num_tokens * scale), 1)

    if name == "W1":
        return await _streams(asking, _distinct(asking, rng, 1, size(128)), size(128))
    if name == "W2":
        return await _streams(asking, _distinct(asking, rng, 16, size(256)), size(64))
    if name == "W3":
        shared = asking.maker().draw(size(1024), rng)
        warming, *prompts = (shared + own for own in _distinct(asking, rng, 17, size(32)))
        await _streams(asking, [warming], 1)
        return await _streams(asking, prompts, size(32))
    if name == "W4":
        return await _streams(asking, _distinct(asking, rng, 1, size(2000)), 1)
    assert name == "W5"
    return await _interference(asking, rng, size(64), size(256), size(1000), scale * W5_PAUSE_S)


def _distinct(asking: Asking, rng: random.Random, count: int, num_tokens: int) -> list[list[Any]]:
    maker = asking.maker()
    return [maker.draw(num_tokens, rng) for _ in range(count)]


async def _streams(
    asking: Asking, prompts: Sequence[Sequence[Any]], num_output_tokens: int
) -> Measured:
    """All at once."""
    plan = [asking.request(prompt, num_output_tokens) for prompt in prompts]
    run = await Sender(asking.client).send(plan)
    outcomes = run.outcomes
    num_output = sum(each.num_output_tokens for each in outcomes)
    numbers = {
        "ttft_ms": _median(each.ttft_s for each in outcomes),
        "tpot_ms": _median(each.tpot_s for each in outcomes),
        "tokens_per_s": num_output / run.duration_s,
        "total_ms": 1e3 * run.duration_s,
    }
    return _measured(outcomes, numbers)


async def _interference(
    asking: Asking,
    rng: random.Random,
    num_prompt: int,
    num_output: int,
    num_long: int,
    pause_s: float,
) -> Measured:
    plan = [asking.request(prompt, num_output) for prompt in _distinct(asking, rng, 8, num_prompt)]
    running = asyncio.create_task(Sender(asking.client).send(plan))
    disturbing: list[asyncio.Task[Any]] = []
    while not running.done():
        await asyncio.wait({running}, timeout=pause_s)
        if not running.done():
            long = asking.request(asking.maker().draw(num_long, rng), 1)
            disturbing.append(asyncio.create_task(Sender(asking.client).send([long])))
    run = await running
    long_ones = [outcome for each in disturbing for outcome in (await each).outcomes]
    gaps = Values(
        1e3 * (later - earlier)
        for each in run.outcomes
        for earlier, later in pairwise(each.token_times_s)
    )
    numbers = {
        "itl_p50_ms": gaps.at(50) or 0.0,
        "itl_p99_ms": gaps.at(99) or 0.0,
        "long_ttft_ms": _median(each.ttft_s for each in long_ones),
        "tokens_per_s": sum(each.num_output_tokens for each in run.outcomes) / run.duration_s,
    }
    return _measured(run.outcomes, numbers, beside=long_ones)


def _measured(
    outcomes: Sequence[Outcome], numbers: dict[str, float], *, beside: Sequence[Outcome] = ()
) -> Measured:
    wrong = [each.error for each in (*outcomes, *beside) if each.has_failed]
    wrong += [
        f"{each.num_output_tokens} tokens came, {each.request.num_output_tokens} were asked for"
        for each in outcomes
        if each.num_output_tokens != each.request.num_output_tokens
    ]
    return Measured(
        numbers=numbers,
        prompt_tokens=tuple(sorted(each.num_prompt_tokens for each in outcomes)),
        output_tokens=tuple(sorted(each.num_output_tokens for each in outcomes)),
        wrong=wrong[0] if wrong else "",
    )


def _median(seconds: Any) -> float:
    return 1e3 * (Values(each for each in seconds if each is not None).at(50) or 0.0)
