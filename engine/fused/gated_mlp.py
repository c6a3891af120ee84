"""The gated feed-forward block: two products with one activation between them, then a third."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from engine.fused.projections import is_projection, rounds_inputs

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")  # the numbers of `engine/native/gated_linear.h`


class FusedGatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), see `engine/native/gated_linear.h`."""

    def __init__(self, module: Any, *, activation: str) -> None:
        super().__init__()
        self.gate_proj = module.gate_proj
        self.up_proj = module.up_proj
        self.down_proj = module.down_proj
        self.activation = ACTIVATIONS.index(activation)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[.., hidden_size] -> the same shape."""
        gated = torch.ops.relevo.gated_linear.default(
            hidden,
            self.gate_proj.weight,
            self.up_proj.weight,
            self.gate_proj.bias,
            self.up_proj.bias,
            self.activation,
            rounds_inputs(self.gate_proj),
        )
        down: torch.Tensor = self.down_proj(gated)
        return down


def gated_mlp_candidates(module: nn.Module) -> Iterator[FusedGatedMLP]:
    """What a module with these three products might be."""
    names = {name for name, child in module.named_children() if is_projection(child)}
    if names == {"gate_proj", "up_proj", "down_proj"}:
        for activation in ACTIVATIONS:
            yield FusedGatedMLP(module, activation=activation)
