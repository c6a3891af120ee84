"""Sampling that asks the device nothing: tokens stay there until somebody reads them.

The same tokens as `sampling/sampler.py` gives, from the same numbers. Only what needs no token that
is still to come: whoever has penalties, bad words or a grammar waits for the token before.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.request import Request
from engine.sampling.candidates import NUM_CANDIDATES, log_total, may_decide, nucleus
from engine.sampling.draw import draw_at
from engine.sampling.params import SamplingParams
from engine.sampling.random_stream import Purpose, uniform
from engine.sampling.rows import SamplingRow
from engine.sampling.sampler import GREEDY_BELOW

_GREEDY, _FEW, _ALL = 0, 1, 2  # the likeliest token; drawn among the likeliest; among all
NUM_COLUMNS = 6


def needs_no_tokens(request: Request) -> bool:
    """Whether its next token can be drawn before the one before it is known."""
    params = request.sampling_params
    return (
        request.num_choices == 1
        and request.new_token_mask is None
        and not params.has_penalties
        and not params.logit_bias
        and not params.bad_words
        and not params.allowed_token_ids
        and params.num_logprobs is None
        and params.num_prompt_logprobs is None
        and request.num_output_tokens >= params.min_tokens
        and _way_of(params) is not None
    )


def may_be_undecided(row: SamplingRow) -> bool:
    """Whether `sample_queued` may leave the row to somebody else."""
    return _way_of(row.params) == _FEW


def sampling_columns(rows: Sequence[SamplingRow]) -> npt.NDArray[np.float64]:
    """What `sample_queued` reads of each row, [NUM_COLUMNS, rows]."""
    values: list[tuple[float, ...]] = []
    for row in rows:
        params, way = row.params, _way_of(row.params)
        assert way is not None, "rows that need more are sampled elsewhere"
        number = 0.0
        if way != _GREEDY:
            number = uniform(
                seed=params.seed,
                position=row.position,
                purpose=Purpose.SAMPLE,
                choice_index=row.choice_index,
            )
        temperature = 1.0 if way == _GREEDY else params.temperature
        values.append((way, temperature, params.top_k, params.top_p, params.min_p, number))
    return np.array(values, dtype=np.float64).reshape(-1, NUM_COLUMNS).T


def sample_queued(
    logits: torch.Tensor,  # [rows, vocab]; is kept as it is
    columns: torch.Tensor,  # [NUM_COLUMNS, rows] float64, on the device
    rows: Sequence[SamplingRow],
) -> torch.Tensor:
    """[3, rows] int64: token ids; whether the logits were finite; whether the id is certain.

    It is not where more tokens than the likeliest few may come: then `sample` has the last word.
    """
    if logits.dtype in {torch.bfloat16, torch.float16}:
        logits = logits.float()
    best = logits.amax(dim=-1, keepdim=True)  # [rows, 1]
    token_ids = logits.argmax(dim=-1)
    is_decided = torch.ones_like(token_ids, dtype=torch.bool)
    ways = {_way_of(row.params) for row in rows}
    way, temperature, top_k, top_p, min_p, number = columns[:, :, None]  # each [rows, 1]
    if _FEW in ways:
        needs_total = any(row.params.top_k == 0 and row.params.top_p < 1.0 for row in rows)
        filters = (temperature, top_k, top_p, min_p)
        kept, ids, decided = _likeliest(logits, filters, needs_total=needs_total)
        drawn = ids.gather(1, draw_at(kept, number)[:, None])[:, 0]
        token_ids = torch.where(way[:, 0] == _FEW, drawn, token_ids)
        is_decided = decided | (way[:, 0] != _FEW)
    if _ALL in ways:
        scaled = (logits - best) / temperature.to(logits)
        token_ids = torch.where(way[:, 0] == _ALL, draw_at(scaled, number), token_ids)
    is_usable = torch.isfinite(best[:, 0])  # NaN wins a maximum
    return torch.stack((token_ids, is_usable.long(), is_decided.long()))


def _way_of(params: SamplingParams) -> int | None:
    """How a row becomes a token; None where all its logits would have to be sorted."""
    if params.temperature < GREEDY_BELOW:
        return _GREEDY
    if may_decide(params):
        return _FEW
    return _ALL if params.top_k == 0 else None


def _likeliest(
    logits: torch.Tensor, filters: tuple[torch.Tensor, ...], *, needs_total: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`draw_among_likeliest` for all rows alike: what is left [rows, n], ids, whether it counts."""
    temperature, top_k, top_p, min_p = filters  # each [rows, 1] float64
    depth = min(NUM_CANDIDATES, logits.shape[1])
    top = logits.topk(depth)  # [rows, depth]
    scaled = top.values.double() / temperature
    place = torch.where(top_k > 0, top_k, float(depth)).clamp(max=depth).long() - 1
    at_rank = scaled.gather(1, place).masked_fill(top_k == 0, float("-inf"))
    lowest = torch.maximum(scaled[:, :1] + min_p.log(), at_rank)
    left = scaled.masked_fill(scaled < at_rank, float("-inf"))
    total = left.logsumexp(dim=-1, keepdim=True)
    if needs_total:
        total = torch.where(top_k > 0, total, log_total(logits, temperature))
    by_mass = nucleus(left, total, top_p).masked_fill(top_p >= 1.0, float("-inf"))
    lowest = torch.maximum(lowest, by_mass)
    is_decided = (scaled[:, -1] < lowest[:, 0]) | (depth == logits.shape[1])
    ids, order = top.indices.sort(dim=-1)
    kept = scaled.masked_fill(scaled < lowest, float("-inf")).gather(1, order)
    return kept, ids, is_decided
