"""A whole decoder layer in one operation."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from engine.fused.attention import FusedAttention
from engine.fused.gated_mlp import FusedGatedMLP
from engine.fused.norm import FusedNorm
from engine.native_attention import NativeAttention

# Where families have their norms: before attention, behind it, before the feed-forward block,
# behind that.
_ARRANGEMENTS = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
)


class InOneCall(nn.Module):
    """What the library does in one call where a model calls a decoder layer."""

    native: Any  # of the library's classes, with `forward`

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, num_tokens, hidden_size]
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # each [1, num_tokens, rotary_dim]
        attention_metadata: NativeAttention,
        **_: Any,
    ) -> torch.Tensor:
        """[1, num_tokens, hidden_size] -> the same shape."""
        hidden: torch.Tensor = self.native.forward(
            hidden_states, *position_embeddings, *attention_metadata.tensors
        )
        return hidden


class FusedLayer(InOneCall):
    """What a transformers decoder layer does, called as that is; its modules are all fused ones.

    See `engine/native/decoder_layer.h`.
    """

    def __init__(self, module: Any, arrangement: tuple[str | None, ...]) -> None:
        super().__init__()
        for name, child in module.named_children():
            self.add_module(name, child)
        self.native = _native_layer(
            attention=module.self_attn,
            mlp=module.mlp,
            norms=[getattr(module, name) if name else None for name in arrangement],
            residual_factor=getattr(module, "residual_multiplier", 1.0),
        )

    def round_inputs(self) -> None:
        """Of its products, from now on, to bfloat16 where this CPU has products of that."""
        self.native.round_inputs()


def looks_like_layer(module: nn.Module) -> bool:
    """Whether a module has the blocks of a decoder layer."""
    return {"self_attn", "mlp"} <= {name for name, _ in module.named_children()}


def layer_candidates(module: Any) -> Iterator[FusedLayer]:
    """What a layer might be whose modules were all fused."""
    if not looks_like_layer(module):
        return
    children = dict(module.named_children())
    attention, mlp = children.pop("self_attn"), children.pop("mlp")
    if not isinstance(attention, FusedAttention) or not isinstance(mlp, FusedGatedMLP):
        return
    others = [*children.values(), *attention.norms]
    if not all(each is None or isinstance(each, FusedNorm) for each in others):
        return
    for arrangement in _ARRANGEMENTS:
        if children.keys() == set(arrangement) - {None}:
            yield FusedLayer(module, arrangement)


def _native_layer(
    *, attention: Any, mlp: Any, norms: list[FusedNorm | None], residual_factor: float
) -> Any:
    """The layer as our compiled library has it; its arguments are in the order of that."""
    before_attention, behind_attention, before_mlp, behind_mlp = norms
    norms = [before_attention, *attention.norms, behind_attention, before_mlp, behind_mlp]
    products = [
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.o_proj,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
    ]
    layer = attention.layer
    return torch.classes.relevo.DecoderLayer(
        [norm and norm.weight for norm in norms],
        [norm.epsilon if norm else 0.0 for norm in norms],
        [norm.offset if norm else 0.0 for norm in norms],
        [product.weight for product in products],
        [product.bias for product in products],
        attention.head_dim,
        mlp.activation,
        float(residual_factor),
        layer.index,
        layer.scaling,
        layer.window or 0,
        layer.softcap or 0.0,
        layer.sinks,
    )
