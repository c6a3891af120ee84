"""Root mean square norm in one operation."""

from collections.abc import Iterator

import torch
from torch import nn

_EPSILON_NAMES = ("variance_epsilon", "eps")


class FusedNorm(nn.Module):
    """x / sqrt(mean(x * x) + epsilon) * (weight + offset), see `engine/native/rms_norm.h`."""

    def __init__(self, weight: nn.Parameter, *, epsilon: float, offset: float) -> None:
        super().__init__()
        self.weight = weight  # [width]
        self.epsilon = epsilon
        self.offset = offset  # 1 for Gemma, whose weights are kept around zero

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[.., width] -> the same shape."""
        normed: torch.Tensor = torch.ops.relevo.rms_norm.default(
            hidden, self.weight, self.epsilon, self.offset
        )
        return normed


def norm_candidates(module: nn.Module) -> Iterator[FusedNorm]:
    """What a module with one weight per column and an epsilon might be."""
    weight = getattr(module, "weight", None)
    epsilon = next((e for name in _EPSILON_NAMES if (e := getattr(module, name, None))), None)
    if epsilon is None or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return
    if getattr(module, "bias", None) is not None:
        return
    for offset in (0.0, 1.0):
        yield FusedNorm(weight, epsilon=float(epsilon), offset=offset)
