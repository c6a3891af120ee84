"""Random requests of every kind the engine serves, and what became of them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.request import FinishReason, RequestOutput
from tests.tiny_model import EOS_TOKEN_ID, VOCAB_SIZE

FIRST_ID = 3  # after the special ones
MAX_PROMPT_TOKENS = 52
MAX_NEW_TOKENS = 16

Choice = tuple[str, int]  # request id and index


class ThreeWayMask:
    """A grammar: the ids of an output take turns by their remainder of three."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def advance(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if not self.allowed_tokens()[token_id]:
                raise ValueError(f"Got {token_id = } at {self.num_tokens}")
            self.num_tokens += 1

    def allowed_tokens(self) -> npt.NDArray[np.bool_]:
        allowed = np.arange(VOCAB_SIZE) % 3 == self.num_tokens % 3
        allowed[EOS_TOKEN_ID] = self.num_tokens > 4
        return allowed


def make_specs(num_requests: int, *, seed: int) -> list[dict[str, Any]]:
    """Arguments of `make_request`; prompts share beginnings, so blocks are shared and evicted."""
    chance = random.Random(seed)
    stems = [_ids(chance, 40) for _ in range(4)]
    return [
        {"request_id": f"r-{number}", **_make_spec(chance, stems, number)}
        for number in range(num_requests)
    ]


def choices_of(spec: dict[str, Any]) -> list[Choice]:
    """Every choice a spec asks for."""
    return [(spec["request_id"], index) for index in range(spec["num_choices"])]


def _make_spec(chance: random.Random, stems: list[list[int]], number: int) -> dict[str, Any]:
    stem = chance.choice(stems)[: chance.randrange(1, 41)]
    spec: dict[str, Any] = {
        "token_ids": stem + _ids(chance, chance.randrange(0, MAX_PROMPT_TOKENS - 40)),
        "max_tokens": chance.randrange(1, MAX_NEW_TOKENS),
        "priority": chance.choice([0, 0, 0, 1, -1]),
        "cache_salt": chance.choice(["", "", "", "salt"]),
        "ignore_eos": chance.random() < 0.5,
        "num_choices": chance.choice([1, 1, 1, 2, 3]),
        "seed": number,
    }
    if chance.random() < 0.2:
        spec["new_token_mask"] = ThreeWayMask
    for name, value in _parameters(chance).items():
        if chance.random() < 0.2:
            spec[name] = value
    if "min_tokens" in spec:
        spec["min_tokens"] = min(spec["min_tokens"], spec["max_tokens"])
    return spec


def _parameters(chance: random.Random) -> dict[str, Any]:
    return {
        "temperature": chance.choice([0.7, 1.0, 1.7]),
        "top_k": chance.randrange(1, 60),
        "top_p": chance.uniform(0.2, 1.0),
        "min_p": chance.uniform(0.0, 0.2),
        "repetition_penalty": chance.uniform(0.5, 2.0),
        "presence_penalty": chance.uniform(-2.0, 2.0),
        "frequency_penalty": chance.uniform(-2.0, 2.0),
        "logit_bias": {token_id: chance.uniform(-100, 100) for token_id in _ids(chance, 3)},
        "bad_words": tuple(tuple(_ids(chance, length)) for length in (1, 2)),
        "allowed_token_ids": tuple({*_ids(chance, 150), EOS_TOKEN_ID}),
        "min_tokens": chance.randrange(0, 8),
        "stop_token_ids": tuple(_ids(chance, 8)),
        "num_logprobs": chance.randrange(0, 4),
        "num_prompt_logprobs": chance.randrange(0, 3),
    }


def _ids(chance: random.Random, num_ids: int) -> list[int]:
    return [chance.randrange(FIRST_ID, VOCAB_SIZE) for _ in range(num_ids)]


@dataclass(slots=True)
class Outcome:
    """What one choice said until it ended."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the tokens, where wanted
    prompt_logprobs: list[float] = field(default_factory=list)  # shared by all its choices
    finish_reason: FinishReason | None = None

    def add(self, output: RequestOutput) -> None:
        """Take one output; no token may follow the last."""
        if output.prompt_logprobs is not None:
            self.prompt_logprobs += [each.logprob for each in output.prompt_logprobs.entries]
        if self.finish_reason is not None:
            # Progress of a prompt that other choices wait for is told with the first one's index.
            is_progress = not output.token_ids and output.finish_reason is None
            assert is_progress, "an output after the end"
            return
        self.tokens += output.token_ids
        self.logprobs += [each.logprob for each in output.logprobs]
        self.finish_reason = output.finish_reason

    def agrees_with(self, whole: "Outcome") -> bool:
        """Whether this one, up to an abort, is like a whole run of the same choice alone."""
        is_aborted = self.finish_reason is FinishReason.ABORT
        num_tokens = len(self.tokens) if is_aborted else None
        num_told = len(self.prompt_logprobs) if is_aborted else None
        return (
            self.tokens == whole.tokens[:num_tokens]
            and (is_aborted or self.finish_reason is whole.finish_reason)
            and _is_close(self.logprobs, whole.logprobs[: len(self.logprobs)])
            and bool(self.logprobs) == bool(whole.logprobs and self.tokens)
            and _is_close(self.prompt_logprobs, whole.prompt_logprobs[:num_told])
        )


def _is_close(some: list[float], others: list[float]) -> bool:
    return len(some) == len(others) and bool(np.allclose(some, others, rtol=0.0, atol=1e-9))
