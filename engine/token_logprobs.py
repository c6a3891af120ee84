"""How likely tokens were, as a step tells it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One position: natural logarithms of the model's own probabilities, before any setting."""

    logprob: float  # of the token that stands there
    rank: int  # 1 = no token was likelier
    top: tuple[tuple[int, float], ...]  # likeliest tokens with theirs, the best first


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """A piece of the prompt; the first token of a prompt has none."""

    start_position: int  # of the first entry, at least 1
    entries: tuple[TokenLogprobs, ...]

    @property
    def end_position(self) -> int:
        """The first position it says nothing of any more."""
        return self.start_position + len(self.entries)
