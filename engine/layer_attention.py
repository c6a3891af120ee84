"""What one layer's attention is, beside its queries, keys and values."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Softmax attention with the extras of one layer."""

    index: int  # of the layer
    scaling: float
    window: int | None = None  # positions a token sees, its own included
    softcap: float | None = None  # scores are squeezed below it by tanh
    sinks: torch.Tensor | None = None  # [num_heads] scores that take weight and give no value

    @property
    def is_plain(self) -> bool:
        """Whether torch's fused kernel can do it."""
        return self.softcap is None and self.sinks is None
