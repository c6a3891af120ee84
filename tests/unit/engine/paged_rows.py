"""Requests whose KV lies in blocks in a random order."""

from collections.abc import Sequence

import torch

from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.schedule import ScheduledRequest


def make_schedule(
    rows: Sequence[tuple[int, int]], block_size: int
) -> tuple[list[ScheduledRequest], int]:
    """A request for each pair of tokens in the step and context with them; how many blocks."""
    counts = [-(-context // block_size) for _, context in rows]
    free = torch.randperm(sum(counts)).tolist()
    scheduled = []
    for n, ((num_tokens, context), count) in enumerate(zip(rows, counts, strict=True)):
        request = Request(
            request_id=str(n),
            token_ids=[0] * context,
            num_prompt_tokens=context,
            sampling_params=SamplingParams(max_tokens=1),
        )
        request.block_ids, free = free[:count], free[count:]
        scheduled.append(ScheduledRequest(request=request, start=context - num_tokens, end=context))
    return scheduled, sum(counts)
