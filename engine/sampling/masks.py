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
    is_hidden = torch.stack([masks[row] for row in sorted(masks)]).logical_not_()
    if len(masks) == len(logits):
        logits.masked_fill_(is_hidden, float("-inf"))  # without moving a row
        return
    rows = torch.tensor(sorted(masks), device=logits.device)
    logits[rows] = logits[rows].masked_fill_(is_hidden, float("-inf"))
