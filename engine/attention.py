"""Paged attention for unmodified transformers models.

The models call `paged_attention` in each layer with the packed row of this step's tokens. All it
knows beyond that row rides the forward's keyword arguments as `attention_metadata`, so two engines
in one process never meet.
"""

from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from engine.layer_attention import LayerAttention
from engine.model_probe import AttentionProbe

ATTENTION_NAME = "relevo_paged"


class StepAttention(Protocol):
    """Attention of one step: it knows the KV cache and the requests of the packed row."""

    def attend(
        self,
        layer: LayerAttention,
        query: torch.Tensor,  # [num_heads, num_tokens, head_dim]
        key: torch.Tensor,  # [num_kv_heads, num_tokens, head_dim]
        value: torch.Tensor,  # [num_kv_heads, num_tokens, value_dim]
    ) -> torch.Tensor:
        """Keep keys and values, then attend; [num_tokens, num_heads, value_dim]."""


def paged_attention(  # noqa: PLR0913 - the signature is transformers'
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    attention_mask: torch.Tensor | None,  # a model that builds one is refused at load
    *,
    attention_metadata: StepAttention | AttentionProbe,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,  # [num_heads] logits of the attention sinks
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over this step's row; [1, num_tokens, num_heads, value_dim]."""
    if isinstance(attention_metadata, AttentionProbe):
        arguments |= {"sliding_window": sliding_window, "attention_mask": attention_mask}
        arguments |= {"softcap": softcap, "s_aux": s_aux}
        attention_metadata.note(module, key, value, arguments)
        shape = (1, query.shape[2], query.shape[1], value.shape[3])
        return query.new_zeros(shape), None
    index = module.layer_idx
    assert isinstance(index, int)
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    layer = LayerAttention(index, scaling, sliding_window, softcap, s_aux)
    return attention_metadata.attend(layer, query[0], key[0], value[0]).unsqueeze(0), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Masks are made per step, by who attends; the model shall build none."""


def register_attention() -> None:
    """Make `attn_implementation=ATTENTION_NAME` known to transformers; repeating it is harmless."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
