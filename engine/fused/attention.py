"""The attention block of a layer: projections, rotary embedding, paged attention, output."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from engine.attention import StepAttention
from engine.fused.projections import Projections, is_projection
from engine.layer_attention import LayerAttention

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class FusedAttention(nn.Module):
    """What a transformers attention module does, called as that is."""

    def __init__(self, module: Any, layer: LayerAttention) -> None:
        super().__init__()
        self.q_proj, self.k_proj = module.q_proj, module.k_proj
        self.v_proj, self.o_proj = module.v_proj, module.o_proj
        # Norms of each head, in some families.
        self.q_norm: nn.Module | None = getattr(module, "q_norm", None)
        self.k_norm: nn.Module | None = getattr(module, "k_norm", None)
        self._projections = Projections(self.q_proj, self.k_proj, self.v_proj)
        self.head_dim = module.head_dim
        self.layer = layer

    @property
    def norms(self) -> tuple[nn.Module | None, nn.Module | None]:
        """Those of each head's queries and keys."""
        return self.q_norm, self.k_norm

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, num_tokens, hidden_size]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # each [1, num_tokens, rotary_dim]
        *,
        attention_metadata: StepAttention,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """[1, num_tokens, hidden_size] -> the same shape."""
        num_tokens = hidden_states.shape[1]
        query, key, value = (
            heads.view(num_tokens, -1, self.head_dim) for heads in self._projections(hidden_states)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        cosine, sine = position_embeddings
        torch.ops.relevo.rotary.default(query, key, cosine[0], sine[0])
        attended = attention_metadata.attend(
            self.layer, query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        )
        return self.o_proj(attended.reshape(1, num_tokens, -1)), None


def attention_candidates(module: Any, layer: LayerAttention | None) -> Iterator[FusedAttention]:
    """What a module that asked for `layer` of attention might be."""
    children = dict(module.named_children())
    has_all = all(is_projection(children.get(name, module)) for name in _PROJECTIONS)
    if layer is not None and has_all and hasattr(module, "head_dim"):
        yield FusedAttention(module, layer)
