"""Paged attention for unmodified transformers models.

The models call `paged_attention` in each layer with the packed row of this step's tokens. It writes
their keys and values into the KV cache and attends: rows with one new token all at once, longer
pieces of prompts one by one. All it knows beyond that row rides the forward's keyword arguments as
`attention_metadata`, so two engines in one process never meet.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from transformers import AttentionInterface, AttentionMaskInterface

from engine.attention_metadata import (
    AttentionMetadata,
    ChunkRow,
    DecodeRows,
    chunk_mask,
    decode_mask,
)
from engine.kv_cache import KVCache
from engine.model_probe import AttentionProbe

ATTENTION_NAME = "relevo_paged"


def paged_attention(  # noqa: PLR0913 - the signature is transformers'
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    attention_mask: torch.Tensor | None,  # a model that builds one is refused at load
    *,
    attention_metadata: AttentionMetadata | AttentionProbe,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,  # [num_heads] logits of the attention sinks
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over this step's row; [1, num_tokens, num_heads, value_dim]."""
    if isinstance(attention_metadata, AttentionProbe):
        arguments |= {"sliding_window": sliding_window, "attention_mask": attention_mask}
        attention_metadata.note(module, key, value, arguments)
        shape = (1, query.shape[2], query.shape[1], value.shape[3])
        return query.new_zeros(shape), None
    layer = module.layer_idx
    assert isinstance(layer, int)
    kv_cache = attention_metadata.kv_cache
    value_dim, head_dim = value.shape[3], kv_cache.spec.head_dim
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    query, key, value = (_widened(x, head_dim) for x in (query, key, value))
    _write(kv_cache, attention_metadata.write_index[layer], key[0], value[0])
    attend = _Attend(scaling, sliding_window, softcap, s_aux)
    pieces: list[torch.Tensor] = []  # each [tokens, num_heads, head_dim]
    if attention_metadata.decodes is not None:
        pieces.append(_attend_decodes(attend, kv_cache, attention_metadata.decodes, query, layer))
    for chunk in attention_metadata.chunks:
        row = slice(chunk.token_start, chunk.token_start + chunk.num_tokens)
        new = (query[:, :, row], key[:, :, row], value[:, :, row])
        pieces.append(_attend_chunk(attend, kv_cache, chunk, new, layer))
    output = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return output[..., :value_dim].unsqueeze(0), None


def _widened(heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Zeros after heads narrower than the cache's: no score and no kept output changes."""
    missing = head_dim - heads.shape[-1]
    return F.pad(heads, (0, missing)) if missing else heads


def _write(
    kv_cache: KVCache, write_index: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    both = torch.cat((key.transpose(0, 1), value.transpose(0, 1)))  # [2 * tokens, heads, dim]
    kv_cache.token_rows.index_copy_(0, write_index, both.flatten(1))


class _Attend:
    """Softmax attention with the extras of one layer."""

    __slots__ = ("scaling", "sinks", "softcap", "window")

    def __init__(
        self,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> None:
        self.scaling = scaling
        self.window = window
        self.softcap = softcap
        self.sinks = sinks

    @property
    def is_plain(self) -> bool:
        """Whether a fused kernel can do it."""
        return self.softcap is None and self.sinks is None

    def __call__(
        self,
        query: torch.Tensor,  # [rows, heads, queries, head_dim]
        key: torch.Tensor,  # [rows, kv_heads, context, head_dim]
        value: torch.Tensor,
        mask: torch.Tensor | None = None,  # [.., queries, context], added to the scores
        *,
        is_causal: bool = False,
    ) -> torch.Tensor:
        if not self.is_plain:
            return self._by_hand(query, key, value, mask)
        grouped = query.shape[1] != key.shape[1]
        if grouped and mask is not None and not query.is_cpu:
            # With a mask CUDA has a fast kernel only for equal head counts.
            key, value = _repeated(key, query), _repeated(value, query)
            grouped = False
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=is_causal,
            scale=self.scaling,
            enable_gqa=grouped,
        )

    def _by_hand(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Scores squeezed by tanh before the mask, and a sink that takes its share of weight."""
        key, value = _repeated(key, query), _repeated(value, query)
        scores = torch.matmul(query, key.transpose(2, 3)) * self.scaling
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if mask is not None:
            scores = scores + mask
        if self.sinks is not None:
            # One sink per head of the model; decode rows have their heads in two dimensions.
            sinks = self.sinks.view(1, query.shape[1], -1, 1).to(scores.dtype)
            scores = torch.cat((scores, sinks.expand(*scores.shape[:3], 1)), dim=-1)
        at_least_float32 = torch.promote_types(query.dtype, torch.float32)
        weights = torch.softmax(scores, dim=-1, dtype=at_least_float32).to(query.dtype)
        return torch.matmul(weights[..., : key.shape[2]], value)


def _repeated(heads: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """KV heads, each as often as query heads share it."""
    return heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1)


def _attend_decodes(
    attend: _Attend, kv_cache: KVCache, rows: DecodeRows, query: torch.Tensor, layer: int
) -> torch.Tensor:
    spec = kv_cache.spec
    key, value = _gather(kv_cache, rows.slab_index[layer], rows.num_rows)
    mask = decode_mask(rows, attend.window, key.shape[2], query.dtype)
    if mask is None:
        key, value = key[:, :, : rows.max_context_len], value[:, :, : rows.max_context_len]
    # The queries that share a KV head become rows of one small matrix: [rows, kv_heads, group, dim]
    packed = query[0, :, : rows.num_rows].transpose(0, 1)
    packed = packed.reshape(rows.num_rows, spec.num_kv_heads, -1, spec.head_dim)
    return attend(packed, key, value, mask).reshape(rows.num_rows, -1, spec.head_dim)


def _attend_chunk(
    attend: _Attend,
    kv_cache: KVCache,
    chunk: ChunkRow,
    new: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    layer: int,
) -> torch.Tensor:
    query, key, value = new
    context_len = chunk.context_start + chunk.num_tokens
    fits_window = attend.window is None or context_len <= attend.window
    if chunk.context_start == 0 and fits_window and attend.is_plain:
        output = attend(query, key, value, is_causal=True)
    else:
        key, value = _gather(kv_cache, chunk.slab_index[layer], 1)
        mask = chunk_mask(chunk, attend.window, query.device, query.dtype)
        output = attend(query, key[:, :, :context_len], value[:, :, :context_len], mask)
    return output[0].transpose(0, 1)  # [tokens, num_heads, head_dim]


def _gather(
    kv_cache: KVCache, slab_index: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of each row's own blocks, each [rows, kv_heads, context, head_dim]."""
    spec = kv_cache.spec
    slabs = kv_cache.scratch(slab_index.shape[0])
    torch.index_select(kv_cache.slab_rows, 0, slab_index, out=slabs)
    both = slabs.view(2, num_rows, -1, spec.num_kv_heads, spec.head_dim).transpose(2, 3)
    return both[0], both[1]


def _no_mask(*_: Any, **__: Any) -> None:
    """Masks are made per step by this module; the model shall build none."""


def register_attention() -> None:
    """Make `attn_implementation=ATTENTION_NAME` known to transformers; repeating it is harmless."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
