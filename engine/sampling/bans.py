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
    rows = torch.tensor(list(banned), device=logits.device)
    index = torch.tensor(
        [(n, token_id) for n, ids in enumerate(banned.values()) for token_id in ids],
        device=logits.device,
    )
    before = logits[rows]
    after = before.clone()
    after[index[:, 0], index[:, 1]] = float("-inf")
    is_something_left = after.amax(dim=-1, keepdim=True) > float("-inf")
    logits[rows] = torch.where(is_something_left, after, before)
