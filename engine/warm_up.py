"""Real steps before the first request: they pay for lazy set-up and give the first rates."""

import time
from typing import Protocol

from engine.load import StepOutput
from engine.request import Request
from engine.sampling.params import SamplingParams


class WarmableEngine(Protocol):
    """The verbs of an engine used here."""

    vocab_size: int

    def add_request(self, request: Request) -> None:
        """Queue a request."""

    def has_work(self) -> bool:
        """Whether a step might do something."""

    def step(self) -> StepOutput:
        """Run one step."""


def run_warm_up(engine: WarmableEngine, *, num_requests: int, num_tokens: int) -> None:
    """Serve some requests of this many prompt tokens to their end."""
    for number in range(num_requests):
        token_ids = [(number + position) % engine.vocab_size for position in range(num_tokens)]
        engine.add_request(
            Request(
                request_id=f"warm-up-{number}",
                token_ids=token_ids or [0],
                num_prompt_tokens=max(1, num_tokens),
                sampling_params=SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
                # Its own salt each time: a cached prompt would show no speed.
                cache_salt=f"warm-up-{time.monotonic_ns()}",
            )
        )
    while engine.has_work():
        engine.step()
