"""Decoder layers that follow each other in one operation."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from engine.fused.layer import FusedLayer
from engine.native_attention import NativeAttention


class FusedStack(nn.Module):
    """What its layers do one after another, called as each of them is.

    It stands in the model's list of layers as the only one: see `engine/native/decoder_stack.h`.
    """

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._native = torch.classes.relevo.DecoderStack([layer.native for layer in layers])

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, num_tokens, hidden_size]
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # each [1, num_tokens, rotary_dim]
        attention_metadata: NativeAttention,
        **_: Any,
    ) -> torch.Tensor:
        """[1, num_tokens, hidden_size] -> the same shape."""
        hidden: torch.Tensor = self._native.forward(
            hidden_states, *position_embeddings, *attention_metadata.tensors
        )
        return hidden


def find_stacks(model: nn.Module) -> Iterator[tuple[str, list[FusedLayer]]]:
    """Lists of nothing but fused layers, with their names in the model."""
    for name, module in model.named_modules():
        layers = [layer for layer in module.children() if isinstance(layer, FusedLayer)]
        is_whole = isinstance(module, nn.ModuleList) and len(layers) == len(module)
        if is_whole and len(layers) > 1:
            yield name, layers
