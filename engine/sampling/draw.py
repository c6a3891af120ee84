"""One token per row from a distribution and a random number that depends on its place alone."""

from collections.abc import Sequence

import torch

# The sum of a piece and then the sums in one piece: far less to add up in order than a vocabulary.
_PIECE = 256


def draw(logits: torch.Tensor, numbers: Sequence[float]) -> torch.Tensor:
    """`draw_at` for numbers that are on the host."""
    fractions = torch.tensor(numbers, dtype=torch.float64, device=logits.device)
    return draw_at(logits, fractions[:, None])


def draw_at(logits: torch.Tensor, fractions: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution of `logits` [rows, vocab] at float64 fractions [rows, 1].

    Overwrites `logits`: fresh memory for every step of it costs more than the arithmetic. Returns
    ids, [rows]; a token with logit -inf is never drawn. All sums are in float64: of 100,000 float32
    addends the rare tokens would be lost.
    """
    weights = logits.sub_(logits.amax(dim=-1, keepdim=True)).exp_()  # [rows, vocab], the best is 1
    if missing := -weights.shape[1] % _PIECE:
        weights = torch.nn.functional.pad(weights, (0, missing))
    pieces = weights.view(len(weights), -1, _PIECE)  # [rows, pieces, _PIECE]
    sums = pieces.sum(dim=-1, dtype=torch.float64)  # [rows, pieces]
    chosen, fractions = _invert(sums, fractions)
    rows = torch.arange(len(weights), device=logits.device)
    place, _ = _invert(pieces[rows, chosen].double(), fractions)
    # A row that is not finite may end anywhere; on a GPU an id beyond the last ends the process.
    return (chosen * _PIECE + place).clamp(max=logits.shape[1] - 1)


def _invert(weights: torch.Tensor, fractions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a fraction [rows, 1] of all weight [rows, n] is reached: place [rows], and how far in.

    What is reached has a weight above zero.
    """
    cumulative = weights.cumsum(dim=-1)
    # Scaled by the last sum, so that rounding cannot push the number past the end.
    targets = fractions * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, targets, right=True)  # [rows, 1]
    place = place.clamp(max=weights.shape[1] - 1)  # a row that is not finite has no place
    own = weights.gather(1, place)
    inside = (targets - (cumulative.gather(1, place) - own)) / own
    below_one = 1.0 - torch.finfo(torch.float64).eps
    return place[:, 0], inside.clamp(min=0.0, max=below_one)
