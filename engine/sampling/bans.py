"""Tokens that may not come now."""

from collections.abc import Mapping, Sequence

import torch


def completed_by(bad_words: Sequence[Sequence[int]], output: Sequence[int]) -> list[int]:
    """Return the tokens that would complete one of these sequences after this output."""
    return [
        word[-1]
        for word in bad_words
        if len(word) == 1 or tuple(output[1 - len(word) :]) == tuple(word[:-1])
    ]


def ban(logits: torch.Tensor, banned: Mapping[int, Sequence[int]]) -> None:
    """Hide tokens; row number -> ids, in place.

    A row that would be left with nothing keeps what it has: a wish cannot stop a request.
    """
    rows, ids = torch.tensor(
        [(row, token_id) for row, own in banned.items() for token_id in own],
        device=logits.device,
    ).T
    before = logits[rows, ids]
    logits[rows, ids] = float("-inf")
    is_empty = logits.amax(dim=-1) == float("-inf")
    logits[rows, ids] = torch.where(is_empty[rows], before, logits[rows, ids])
