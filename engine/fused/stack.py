"""Decoder layers that follow each other in one operation."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from engine.fused.layer import FusedLayer, InOneCall


class FusedStack(InOneCall):
    """What its layers do one after another, called as each of them is.

    It stands in the model's list of layers as the only one: see `engine/native/decoder_stack.h`.
    """

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.native = torch.classes.relevo.DecoderStack([layer.native for layer in layers])


def find_stacks(model: nn.Module) -> Iterator[tuple[str, list[FusedLayer]]]:
    """Lists of nothing but fused layers, with their names in the model."""
    for name, module in model.named_modules():
        layers = [layer for layer in module.children() if isinstance(layer, FusedLayer)]
        is_whole = isinstance(module, nn.ModuleList) and len(layers) == len(module)
        if is_whole and len(layers) > 1:
            yield name, layers
