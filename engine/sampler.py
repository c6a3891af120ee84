"""Logits -> one token per row, the same token in whatever batch the row stands."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.random_stream import Purpose, uniform
from engine.request import SamplingParams

_GREEDY_BELOW = 1e-5  # temperatures under this would overflow the division


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """What one row needs beside its logits."""

    params: SamplingParams
    position: int  # absolute position of the token to be sampled
    banned_token_ids: tuple[int, ...] = ()  # not yet allowed, because of min_tokens


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
    """One token per row of `logits` [rows, vocab]; None where the logits are not finite."""
    if logits.dtype in {torch.bfloat16, torch.float16}:
        logits = logits.float()
    is_usable = torch.isfinite(logits.amax(dim=-1))  # NaN wins a maximum
    logits = _ban(logits, rows)
    token_ids = logits.argmax(dim=-1)
    random_rows = [n for n, row in enumerate(rows) if row.params.temperature >= _GREEDY_BELOW]
    if random_rows:
        index = torch.tensor(random_rows, device=logits.device)
        chosen = [rows[n] for n in random_rows]
        token_ids[index] = _sample_randomly(logits[index], chosen)
    return [
        token_id if usable else None
        for token_id, usable in zip(token_ids.tolist(), is_usable.tolist(), strict=True)
    ]


def _ban(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    banned = [(n, token_id) for n, row in enumerate(rows) for token_id in row.banned_token_ids]
    if not banned:
        return logits
    index = torch.tensor(banned, device=logits.device).T
    logits = logits.clone()
    logits[index[0], index[1]] = float("-inf")
    return logits


def _sample_randomly(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Invert the cumulative distribution at one random number per row; [rows]."""
    temperatures = _column([row.params.temperature for row in rows], logits)
    # float64: a vocabulary of 100,000 float32 addends loses the rare tokens.
    logits = logits.double() / temperatures
    logits = _filter(logits, rows)
    cumulative = torch.softmax(logits, dim=-1).cumsum(dim=-1)  # [rows, vocab]
    numbers = [
        uniform(seed=row.params.seed, position=row.position, purpose=Purpose.SAMPLE) for row in rows
    ]
    # Scaled by the last sum, so that rounding cannot push the number past the end; the first
    # token whose sum exceeds it has a probability above zero.
    targets = _column(numbers, logits) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True)[:, 0]


def _filter(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Hide what top-k, top-p and min-p leave out."""
    wanting = [
        n
        for n, row in enumerate(rows)
        if row.params.top_k or row.params.top_p < 1.0 or row.params.min_p
    ]
    if not wanting:
        return logits
    index = torch.tensor(wanting, device=logits.device)
    params = [rows[n].params for n in wanting]
    sorted_logits, order = logits[index].sort(dim=-1, descending=True, stable=True)
    num_tokens = sorted_logits.shape[1]
    ranks = torch.arange(num_tokens, device=logits.device)
    top_k = _column([float(p.top_k or num_tokens) for p in params], logits)
    sorted_logits = sorted_logits.masked_fill(ranks >= top_k, float("-inf"))
    probabilities = torch.softmax(sorted_logits, dim=-1)
    # A token stays while those before it have not reached top_p: the best one always does.
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    is_hidden = mass_before >= _column([p.top_p for p in params], logits)
    min_p = _column([p.min_p for p in params], logits)
    is_hidden |= probabilities < min_p * probabilities[:, :1]
    is_hidden[:, 0] = False
    sorted_logits = sorted_logits.masked_fill(is_hidden, float("-inf"))
    logits[index] = torch.empty_like(sorted_logits).scatter_(1, order, sorted_logits)
    return logits


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
