"""Tokens that may come at all."""

from collections.abc import Mapping, Sequence

import torch


def mask_of(token_ids: Sequence[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Return a mask [vocab] that is true for these tokens."""
    mask = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    mask[torch.tensor(token_ids, device=device)] = True
    return mask


def apply_masks(logits: torch.Tensor, masks: Mapping[int, torch.Tensor]) -> None:
    """Leave each row only what its mask [vocab] allows; row number -> mask, in place."""
    rows = torch.tensor(list(masks), device=logits.device)
    is_allowed = torch.stack(list(masks.values()))
    logits[rows] = logits[rows].masked_fill(~is_allowed, float("-inf"))
