"""Filters and draw among the likeliest tokens of a row: nearly always they decide it.

A distribution over a whole vocabulary costs more than all else a sampler does. Where top-k, top-p
or min-p leave only tokens that are among the likeliest few, the rest need not be looked at.
"""

from collections.abc import Sequence

import torch

from engine.sampling.draw import draw
from engine.sampling.params import SamplingParams

NUM_CANDIDATES = 256


def may_decide(params: SamplingParams) -> bool:
    """Whether some filter is on that could leave so few tokens."""
    return 0 < params.top_k <= NUM_CANDIDATES or (
        params.top_k == 0 and (params.top_p < 1.0 or params.min_p > 0.0)
    )


def draw_among_likeliest(
    logits: torch.Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from `logits` [rows, vocab] as filters and a draw over all tokens would.

    Returns ids and whether they count, both [rows]: a row counts when its last candidate is left
    out, and with it all that are not candidates. That depends on the row alone.
    """
    depth = min(NUM_CANDIDATES, logits.shape[1])
    top = logits.topk(depth)  # [rows, depth]
    temperatures = _column([p.temperature for p in params], logits)
    scaled = top.values.double() / temperatures
    lowest = scaled[:, :1] + _column([p.min_p for p in params], logits).log()
    place = torch.tensor([p.top_k or depth for p in params], device=logits.device)[:, None]
    has_top_k = torch.tensor([p.top_k > 0 for p in params], device=logits.device)[:, None]
    at_rank = scaled.gather(1, place.clamp(max=depth) - 1)
    at_rank = at_rank.masked_fill(~has_top_k, float("-inf"))
    lowest = torch.maximum(lowest, at_rank)
    wanting = [n for n, p in enumerate(params) if p.top_p < 1.0]
    if wanting:
        index = torch.tensor(wanting, device=logits.device)
        left = scaled[index].masked_fill(scaled[index] < at_rank[index], float("-inf"))
        total = left.logsumexp(dim=-1, keepdim=True)
        unbounded = [place for place, n in enumerate(wanting) if params[n].top_k == 0]
        if unbounded:
            rows = [wanting[place] for place in unbounded]
            total[unbounded] = log_total(take_rows(logits, rows), temperatures[rows])
        top_p = _column([params[n].top_p for n in wanting], logits)
        lowest[index] = torch.maximum(lowest[index], nucleus(left, total, top_p))
    is_decided = (scaled[:, -1] < lowest[:, 0]) | (depth == logits.shape[1])
    # In the order of the vocabulary, so that the number means the same token as among all of them.
    ids, order = top.indices.sort(dim=-1)
    kept = scaled.masked_fill(scaled < lowest, float("-inf")).gather(1, order)
    return ids.gather(1, draw(kept, numbers)[:, None])[:, 0], is_decided


def take_rows(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Rows of `logits` by number, each once and in order; no copy when these are all."""
    if len(rows) == len(logits):
        return logits
    return logits[torch.tensor(rows, device=logits.device)]


def log_total(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Logarithm of all weight of each row, [rows, 1] float64, in one piece of fresh memory."""
    best = logits.amax(dim=-1, keepdim=True)
    weights = (logits - best).div_(temperatures.to(logits)).exp_()
    return weights.sum(dim=-1, keepdim=True, dtype=torch.float64).log() + best / temperatures


def nucleus(sorted_logits: torch.Tensor, total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The lowest logit of the fewest tokens that reach top_p; -inf where these do not reach it."""
    mass = (sorted_logits - total).exp().cumsum(dim=-1)
    num_before = (mass < top_p).sum(dim=-1, keepdim=True)
    depth = sorted_logits.shape[1]
    lowest = sorted_logits.gather(1, num_before.clamp(max=depth - 1))
    return lowest.masked_fill(num_before == depth, float("-inf"))


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
