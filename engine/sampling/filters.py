"""What top-k, top-p and min-p leave of a distribution: everything not below one logit per row.

Each of them keeps the likeliest tokens down to some logit; the highest of the three thresholds
counts. Equal logits stay or go together, so it does not matter how a sort orders them.
"""

from collections.abc import Sequence

import torch

from engine.sampling.params import SamplingParams


def hide_unlikely(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return logits [rows, vocab] with -inf where a filter of the row's params says so."""
    wanting = [n for n, p in enumerate(params) if p.top_k or p.top_p < 1.0 or p.min_p]
    if not wanting:
        return logits
    lowest = torch.full_like(logits[:, :1], float("-inf"))  # [rows, 1]
    index = torch.tensor(wanting, device=logits.device)
    lowest[index] = _thresholds(logits[index], [params[n] for n in wanting])
    return logits.masked_fill(logits < lowest, float("-inf"))


def _thresholds(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Lowest logit that stays in each row, [rows, 1]."""
    num_tokens = logits.shape[1]
    ordered = logits.sort(dim=-1, descending=True).values
    lowest = ordered[:, :1] + _column([p.min_p for p in params], logits).log()
    ranks = [min(p.top_k or num_tokens, num_tokens) for p in params]
    at_rank = ordered.gather(1, torch.tensor(ranks, device=logits.device)[:, None] - 1)
    ordered = ordered.masked_fill(ordered < at_rank, float("-inf"))
    lowest = torch.maximum(lowest, at_rank)
    # A token stays while those before it have not reached top_p: the best one always does.
    mass = torch.softmax(ordered, dim=-1).cumsum(dim=-1)
    num_before = (mass < _column([p.top_p for p in params], logits)).sum(dim=-1, keepdim=True)
    nucleus = ordered.gather(1, num_before.clamp(max=num_tokens - 1))
    is_on = torch.tensor([p.top_p < 1.0 for p in params], device=logits.device)[:, None]
    return torch.where(is_on, torch.maximum(lowest, nucleus), lowest)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
