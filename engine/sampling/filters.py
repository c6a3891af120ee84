"""What top-k, top-p and min-p leave of a distribution: everything not below one logit per row.

Each of them keeps the likeliest tokens down to some logit; the highest of the three thresholds
counts. Equal logits stay or go together, so it does not matter how a sort orders them.
"""

from collections.abc import Sequence

import torch

from engine.sampling.params import SamplingParams

# Nearly always the tokens that top-p keeps are among so many; sorting all of them costs far more.
_NUM_CANDIDATES = 256


def hide_unlikely(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return logits [rows, vocab] with -inf where a filter of the row's params says so."""
    wanting = [n for n, p in enumerate(params) if p.top_k or p.top_p < 1.0 or p.min_p]
    if not wanting:
        return logits
    lowest = torch.full_like(logits[:, :1], float("-inf"))  # [rows, 1]
    # Which way a row goes depends on the row alone: its neighbours cannot change its rounding.
    for is_wide in (False, True):
        numbers = [n for n in wanting if _is_wide(params[n]) is is_wide]
        if numbers:
            index = torch.tensor(numbers, device=logits.device)
            chosen = [params[n] for n in numbers]
            lowest[index] = _thresholds(logits[index], chosen, is_wide=is_wide)
    return logits.masked_fill(logits < lowest, float("-inf"))


def _is_wide(params: SamplingParams) -> bool:
    return params.top_k > _NUM_CANDIDATES


def _thresholds(
    logits: torch.Tensor, params: Sequence[SamplingParams], *, is_wide: bool
) -> torch.Tensor:
    """Lowest logit that stays in each row, [rows, 1]."""
    num_tokens = logits.shape[1]
    best = logits.amax(dim=-1, keepdim=True)
    min_p = _column([p.min_p for p in params], logits)
    lowest = best + min_p.log()  # -inf where min_p is off
    if any(p.top_k for p in params):
        ranks = [min(p.top_k or num_tokens, num_tokens) for p in params]
        at_rank = _at_rank(logits, ranks, is_wide=is_wide)
        logits = logits.masked_fill(logits < at_rank, float("-inf"))
        lowest = torch.maximum(lowest, at_rank)
    wanting = [n for n, p in enumerate(params) if p.top_p < 1.0]
    if wanting:
        index = torch.tensor(wanting, device=logits.device)
        top_p = _column([params[n].top_p for n in wanting], logits)
        lowest[index] = torch.maximum(lowest[index], _nucleus(logits[index], top_p))
    return lowest


def _at_rank(logits: torch.Tensor, ranks: Sequence[int], *, is_wide: bool) -> torch.Tensor:
    """The logit at each row's rank, counted from 1; -inf for a rank that leaves nothing out."""
    num_tokens = logits.shape[1]
    depth = num_tokens if is_wide else min(_NUM_CANDIDATES, num_tokens)
    sorted_logits = logits.topk(depth).values
    place = torch.tensor(ranks, device=logits.device)[:, None]
    values = sorted_logits.gather(1, place.clamp(max=depth) - 1)
    return values.masked_fill(place == num_tokens, float("-inf"))


def _nucleus(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The lowest logit of the fewest tokens that together reach top_p, [rows, 1]."""
    total = logits.logsumexp(dim=-1, keepdim=True)
    depth = min(_NUM_CANDIDATES, logits.shape[1])
    lowest, is_reached = _nucleus_within(logits.topk(depth).values, total, top_p)
    if depth < logits.shape[1] and not bool(is_reached.all()):
        rest = (~is_reached[:, 0]).nonzero()[:, 0]
        everything = logits[rest].sort(dim=-1, descending=True).values
        lowest[rest] = _nucleus_within(everything, total[rest], top_p[rest])[0]
    return lowest


def _nucleus_within(
    sorted_logits: torch.Tensor, total: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest logit as above, and whether these candidates do reach top_p; both [rows, 1]."""
    mass = (sorted_logits - total).exp().cumsum(dim=-1)
    num_before = (mass < top_p).sum(dim=-1, keepdim=True)  # tokens that do not reach it
    depth = sorted_logits.shape[1]
    return sorted_logits.gather(1, num_before.clamp(max=depth - 1)), num_before < depth


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
