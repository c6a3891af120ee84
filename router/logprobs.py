"""How likely tokens were, read out of a worker's message."""

from dataclasses import dataclass

from relevo.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One position: natural logarithms of the model's own probabilities."""

    logprob: float  # of the token that stands there
    rank: int  # 1 = no token was likelier
    top: tuple[tuple[int, float], ...]  # likeliest tokens with theirs, the best first


def read_logprobs(message: common_pb2.Logprobs) -> list[TokenLogprobs]:
    """Return one entry for each position; ValueError when the message does not add up."""
    num_top, num_entries = message.num_top, len(message.logprobs)
    num_expected = num_top * num_entries
    if not (
        num_top >= 0
        and len(message.ranks) == num_entries
        and len(message.top_token_ids) == len(message.top_logprobs) == num_expected
    ):
        raise ValueError(f"Got logprobs of {num_entries} tokens with {num_top = } that do not fit")
    pairs = list(zip(message.top_token_ids, message.top_logprobs, strict=True))
    return [
        TokenLogprobs(logprob, rank, tuple(pairs[n * num_top : (n + 1) * num_top]))
        for n, (logprob, rank) in enumerate(zip(message.logprobs, message.ranks, strict=True))
    ]
