"""Attention by torch's own operations: on GPUs, and on CPUs without our compiled library.

It gathers the KV blocks of each request. Rows with one new token attend all at once, longer pieces
of prompts one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by

from engine.gathered_rows import (
    ChunkRow,
    DecodeRows,
    chunk_mask,
    chunk_rows,
    decode_mask,
    decode_rows,
    write_index,
)
from engine.kv_cache import KVCache
from engine.layer_attention import LayerAttention
from engine.schedule import ScheduledRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredAttention:
    """Attention of one step."""

    kv_cache: KVCache
    write_index: torch.Tensor  # [num_layers, 2 * num_tokens] rows of KVCache.token_rows
    decodes: DecodeRows | None
    chunks: list[ChunkRow]

    @classmethod
    def plan(cls, scheduled: Sequence[ScheduledRequest], kv_cache: KVCache) -> "GatheredAttention":
        """What a step with these requests needs; those with one token must come first."""
        return cls(
            kv_cache=kv_cache,
            write_index=write_index(scheduled, kv_cache),
            decodes=decode_rows([e for e in scheduled if e.num_tokens == 1], kv_cache),
            chunks=chunk_rows(scheduled, kv_cache),
        )

    def attend(
        self,
        layer: LayerAttention,
        query: torch.Tensor,  # [num_heads, num_tokens, head_dim]
        key: torch.Tensor,  # [num_kv_heads, num_tokens, head_dim]
        value: torch.Tensor,  # [num_kv_heads, num_tokens, value_dim]
    ) -> torch.Tensor:
        """Keep keys and values, then attend; [num_tokens, num_heads, value_dim]."""
        value_dim = value.shape[2]
        query, key, value = (
            _widened(heads, self.kv_cache.spec.head_dim) for heads in (query, key, value)
        )
        self._write(layer, key, value)
        pieces: list[torch.Tensor] = []  # each [tokens, num_heads, head_dim]
        if self.decodes is not None:
            pieces.append(_attend_decodes(layer, self.kv_cache, self.decodes, query))
        for chunk in self.chunks:
            row = slice(chunk.token_start, chunk.token_start + chunk.num_tokens)
            new = (query[None, :, row], key[None, :, row], value[None, :, row])
            pieces.append(_attend_chunk(layer, self.kv_cache, chunk, new))
        output = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return output[..., :value_dim]

    def _write(self, layer: LayerAttention, key: torch.Tensor, value: torch.Tensor) -> None:
        both = torch.cat((key.transpose(0, 1), value.transpose(0, 1)))  # [2 * tokens, heads, dim]
        index = self.write_index[layer.index]
        self.kv_cache.token_rows.index_copy_(0, index, both.flatten(1))


def _widened(heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Zeros after heads narrower than the cache's: no score and no kept output changes."""
    missing = head_dim - heads.shape[-1]
    return F.pad(heads, (0, missing)) if missing else heads


def _attend(
    layer: LayerAttention,
    query: torch.Tensor,  # [rows, heads, queries, head_dim]
    key: torch.Tensor,  # [rows, kv_heads, context, head_dim]
    value: torch.Tensor,
    mask: torch.Tensor | None = None,  # [.., queries, context], added to the scores
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """[rows, heads, queries, head_dim]."""
    if not layer.is_plain:
        return _by_hand(layer, query, key, value, mask)
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
        scale=layer.scaling,
        enable_gqa=grouped,
    )


def _by_hand(
    layer: LayerAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Scores squeezed by tanh before the mask, and a sink that takes its share of weight."""
    key, value = _repeated(key, query), _repeated(value, query)
    scores = torch.matmul(query, key.transpose(2, 3)) * layer.scaling
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    if mask is not None:
        scores = scores + mask
    if layer.sinks is not None:
        # One sink per head of the model; decode rows have their heads in two dimensions.
        sinks = layer.sinks.view(1, query.shape[1], -1, 1).to(scores.dtype)
        scores = torch.cat((scores, sinks.expand(*scores.shape[:3], 1)), dim=-1)
    at_least_float32 = torch.promote_types(query.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=at_least_float32).to(query.dtype)
    return torch.matmul(weights[..., : key.shape[2]], value)


def _repeated(heads: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """KV heads, each as often as query heads share it."""
    return heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1)


def _attend_decodes(
    layer: LayerAttention, kv_cache: KVCache, rows: DecodeRows, query: torch.Tensor
) -> torch.Tensor:
    spec = kv_cache.spec
    key, value = _gather(kv_cache, rows.slab_index[layer.index], rows.num_rows)
    mask = decode_mask(rows, layer.window, key.shape[2], query.dtype)
    if mask is None:
        key, value = key[:, :, : rows.max_context_len], value[:, :, : rows.max_context_len]
    # The queries that share a KV head become rows of one small matrix: [rows, kv_heads, group, dim]
    packed = query[:, : rows.num_rows].transpose(0, 1)
    packed = packed.reshape(rows.num_rows, spec.num_kv_heads, -1, spec.head_dim)
    return _attend(layer, packed, key, value, mask).reshape(rows.num_rows, -1, spec.head_dim)


def _attend_chunk(
    layer: LayerAttention,
    kv_cache: KVCache,
    chunk: ChunkRow,
    new: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    query, key, value = new
    context_len = chunk.context_start + chunk.num_tokens
    fits_window = layer.window is None or context_len <= layer.window
    if chunk.context_start == 0 and fits_window and layer.is_plain:
        output = _attend(layer, query, key, value, is_causal=True)
    else:
        key, value = _gather(kv_cache, chunk.slab_index[layer.index], 1)
        mask = chunk_mask(chunk, layer.window, query.device, query.dtype)
        output = _attend(layer, query, key[:, :, :context_len], value[:, :, :context_len], mask)
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
