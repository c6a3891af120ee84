"""One token per row from a distribution and a random number that depends on its place alone."""

from collections.abc import Sequence

import torch


def draw(logits: torch.Tensor, numbers: Sequence[float]) -> torch.Tensor:
    """Invert the cumulative distribution of `logits` [rows, vocab] at a number in [0, 1) per row.

    Returns ids, [rows]; a token with logit -inf is never drawn.
    """
    cumulative = torch.softmax(logits, dim=-1).cumsum(dim=-1)  # [rows, vocab]
    # Scaled by the last sum, so that rounding cannot push the number past the end; the first
    # token whose sum exceeds it has a probability above zero.
    column = torch.tensor(numbers, dtype=logits.dtype, device=logits.device)[:, None]
    return torch.searchsorted(cumulative, column * cumulative[:, -1:], right=True)[:, 0]
