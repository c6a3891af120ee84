"""Logits -> one token per row, the same token in whatever batch the row stands."""

from collections.abc import Sequence

import torch

from engine.sampling.bans import ban
from engine.sampling.bias import add_biases
from engine.sampling.candidates import draw_among_likeliest, may_decide, take_rows
from engine.sampling.draw import draw
from engine.sampling.filters import hide_unlikely
from engine.sampling.largest import find_largest
from engine.sampling.masks import apply_masks
from engine.sampling.params import SamplingParams
from engine.sampling.penalties import penalise
from engine.sampling.random_stream import Purpose, uniform
from engine.sampling.rows import SamplingRow

GREEDY_BELOW = 1e-5  # temperatures under this would overflow the division


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
    """One token per row of `logits` [rows, vocab]; None where the logits are not finite."""
    if logits.dtype in {torch.bfloat16, torch.float16}:
        logits = logits.float()
    largest, token_ids = find_largest(logits)
    is_usable = torch.isfinite(largest)
    adjusted = adjust(logits, rows)
    if adjusted is not logits:
        logits, (_, token_ids) = adjusted, find_largest(adjusted)
    random_rows = [n for n, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW]
    if random_rows:
        index = torch.tensor(random_rows, device=logits.device)
        chosen = take_rows(logits, random_rows)
        token_ids[index] = _sample_randomly(chosen, [rows[n] for n in random_rows])
    return [
        token_id if usable else None
        for token_id, usable in zip(token_ids.tolist(), is_usable.tolist(), strict=True)
    ]


def adjust(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Apply what a client wants of single tokens; the same tensor when nobody wants anything."""
    masks = {n: row.token_mask for n, row in enumerate(rows) if row.token_mask is not None}
    banned = {n: row.banned_token_ids for n, row in enumerate(rows) if row.banned_token_ids}
    biases = {n: row.bias for n, row in enumerate(rows) if row.bias is not None}
    counts = {n: row.token_counts for n, row in enumerate(rows) if row.token_counts is not None}
    if not (masks or banned or biases or counts):
        return logits
    logits = logits.clone()
    if masks:
        apply_masks(logits, masks)
    if banned:
        ban(logits, banned)
    if biases:
        add_biases(logits, biases)
    if counts:
        penalise(logits, counts)
    return logits


def _sample_randomly(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Draw a token for each row; [rows]."""
    params = [row.params for row in rows]
    numbers = [
        uniform(
            seed=row.params.seed,
            position=row.position,
            purpose=Purpose.SAMPLE,
            choice_index=row.choice_index,
        )
        for row in rows
    ]
    token_ids = torch.empty(len(rows), dtype=torch.long, device=logits.device)
    few = [n for n, each in enumerate(params) if may_decide(each)]
    others = [n for n, each in enumerate(params) if not may_decide(each)]
    if few:
        index = torch.tensor(few, device=logits.device)
        token_ids[index], is_decided = draw_among_likeliest(
            take_rows(logits, few), [params[n] for n in few], [numbers[n] for n in few]
        )
        left = [n for n, decided in zip(few, is_decided.tolist(), strict=True) if not decided]
        others = sorted(others + left)
    if others:
        index = torch.tensor(others, device=logits.device)
        token_ids[index] = _draw_among_all(
            take_rows(logits, others), [params[n] for n in others], [numbers[n] for n in others]
        )
    return token_ids


def _draw_among_all(
    logits: torch.Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]
) -> torch.Tensor:
    temperatures = [each.temperature for each in params]
    # From the best one down, so that no temperature can make a number too large.
    logits = logits - logits.amax(dim=-1, keepdim=True)
    logits /= torch.tensor(temperatures, dtype=logits.dtype, device=logits.device)[:, None]
    return draw(hide_unlikely(logits, params), numbers)
