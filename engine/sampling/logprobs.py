"""Natural logarithms of the model's own probabilities, before any setting of the request."""

from collections.abc import Sequence

import torch

from engine.token_logprobs import TokenLogprobs

_ROWS_AT_ONCE = 16  # are held in float64


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """One entry for each row of `logits` [rows, vocab]: its token and its likeliest `num_top`."""
    if logits.dtype in {torch.bfloat16, torch.float16}:
        logits = logits.float()
    chosen = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])  # [rows, 1]
    ranks = (logits > chosen).sum(dim=-1) + 1
    total = _log_totals(logits)
    depth = min(max(num_top), logits.shape[1])
    top = logits.topk(depth)  # [rows, depth]
    columns = (
        (chosen - total)[:, 0].tolist(),
        ranks.tolist(),
        top.indices.tolist(),
        (top.values - total).tolist(),
        num_top,
    )
    return [
        TokenLogprobs(logprob, rank, tuple(zip(ids[:num], values[:num], strict=True)))
        for logprob, rank, ids, values, num in zip(*columns, strict=True)
    ]


def _log_totals(logits: torch.Tensor) -> torch.Tensor:
    """Logarithm of the sum of each row's exponentials, [rows, 1].

    Threads share a single row but not many, and so add it up in another order: in float64 that is
    far below what is kept.
    """
    totals = [
        logits[start : start + _ROWS_AT_ONCE].double().logsumexp(dim=-1, keepdim=True)
        for start in range(0, len(logits), _ROWS_AT_ONCE)
    ]
    return torch.cat(totals).to(logits.dtype)
