"""Scheduled requests -> the tensors of one forward."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.attention import StepAttention
from engine.schedule import ScheduledRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Input of one forward: a single row that holds the tokens of all requests."""

    token_ids: torch.Tensor  # [1, num_tokens]
    position_ids: torch.Tensor  # [1, num_tokens]
    # Tokens whose logits are wanted, [num_samples + tokens of prompts whose logprobs are]: first
    # the last one of each request that samples.
    sample_index: torch.Tensor
    num_samples: int
    attention: StepAttention

    @property
    def samples_each(self) -> bool:
        """Whether the logits of all tokens are wanted, in their order: each request has one."""
        return self.num_samples == len(self.sample_index) == self.token_ids.shape[1]


def build_batch(
    scheduled: Sequence[ScheduledRequest], attention: StepAttention, device: torch.device
) -> Batch:
    """Lay the requests out in a row; those with one token must come first."""
    token_ids: list[int] = []
    positions: list[int] = []
    sample_index: list[int] = []
    prompt_index: list[int] = []
    for entry in scheduled:
        request, offset = entry.request, len(token_ids) - entry.start
        token_ids += request.token_ids[entry.start : entry.end]
        positions += range(entry.start, entry.end)
        if entry.samples:
            sample_index.append(len(token_ids) - 1)
        prompt_index += [offset + position - 1 for position in entry.prompt_logprob_positions]
    return Batch(
        token_ids=torch.tensor([token_ids], device=device),
        position_ids=torch.tensor([positions], device=device),
        sample_index=torch.tensor(sample_index + prompt_index, dtype=torch.long, device=device),
        num_samples=len(sample_index),
        attention=attention,
    )
