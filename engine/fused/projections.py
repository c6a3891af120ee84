"""Products that share their input."""

from typing import Any

import torch
from torch import nn

from engine.widening import WideningLinear


def is_projection(module: nn.Module) -> bool:
    """Whether our compiled library can take over the product with its weight."""
    return type(module) is nn.Linear or isinstance(module, WideningLinear)


def rounds_inputs(projection: nn.Module) -> bool:
    """Whether the product is one of inputs rounded to bfloat16."""
    return isinstance(projection, WideningLinear) and projection.rounds


class Projections:
    """Several products of one input in one operation, see `engine/native/linear.h`."""

    def __init__(self, *linears: Any) -> None:
        self._weights = [linear.weight for linear in linears]  # each [out_features, in_features]
        self._first = linears[0]
        self._biases = [linear.bias for linear in linears]

    def __call__(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """[.., in_features] -> [.., out_features] of each."""
        products: list[torch.Tensor] = torch.ops.relevo.linears.default(
            hidden, self._weights, self._biases, rounds_inputs(self._first)
        )
        return products
