"""How one request is sampled and when it stops."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_LOGPROBS = 20  # candidates told for one position


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when the request stops; counts start at `num_prompt_tokens`."""

    max_tokens: int
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # of every token in prompt or output; 1 = off
    presence_penalty: float = 0.0  # of every token in the output
    frequency_penalty: float = 0.0  # the same, times how often it is there
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences that may not be completed
    allowed_token_ids: tuple[int, ...] = ()  # empty = all
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None  # likeliest tokens told beside each output token
    num_prompt_logprobs: int | None = None  # the same for the prompt's tokens

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        _check("max_tokens", self.max_tokens, low=1)
        _check("temperature", self.temperature, low=0.0)
        _check("top_k", self.top_k, low=0)
        _check("top_p", self.top_p, low=0.0, high=1.0, is_open=True)
        _check("min_p", self.min_p, low=0.0, high=1.0)
        _check("repetition_penalty", self.repetition_penalty, low=0.0, is_open=True)
        _check("presence_penalty", self.presence_penalty)
        _check("frequency_penalty", self.frequency_penalty)
        for bias in self.logit_bias.values():
            _check("logit_bias", bias)
        if not all(self.bad_words):
            raise ValueError("Got an empty bad word but expected at least one token")
        _check("min_tokens", self.min_tokens, low=0)
        _check("num_logprobs", self.num_logprobs or 0, low=0, high=MAX_LOGPROBS)
        _check("num_prompt_logprobs", self.num_prompt_logprobs or 0, low=0, high=MAX_LOGPROBS)

    @property
    def has_penalties(self) -> bool:
        """Whether it matters which tokens there are already."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _check(
    name: str,
    value: float,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    is_open: bool = False,
) -> None:
    is_inside = low < value <= high if is_open else low <= value <= high
    if not (math.isfinite(value) and is_inside):
        interval = f"{'(' if is_open else '['}{low:g}, {high:g}]"
        raise ValueError(f"Got {name} = {value} but expected a finite number in {interval}")
