"""What attention has to know about the requests of one forward, and the masks that follow."""

from dataclasses import dataclass, field

import torch

from engine.kv_cache import KVCache


@dataclass(slots=True, kw_only=True)
class DecodeRows:
    """The requests with exactly one token in this step, the first of the packed row."""

    num_rows: int
    context_lens: torch.Tensor  # [num_rows] tokens to attend to, own token included
    max_context_len: int
    slab_index: torch.Tensor  # [num_layers, 2 * num_rows * blocks of the longest]
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)  # by window


@dataclass(slots=True, kw_only=True)
class ChunkRow:
    """A piece of one request's tokens, `[context_start, context_start + num_tokens)`."""

    token_start: int  # first token in the packed row
    num_tokens: int
    context_start: int  # tokens computed before
    slab_index: torch.Tensor  # [num_layers, 2 * blocks of the context]
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)  # by window


@dataclass(slots=True, kw_only=True)
class AttentionMetadata:
    """What one forward needs to know about the requests in its row."""

    kv_cache: KVCache
    write_index: torch.Tensor  # [num_layers, 2 * num_tokens] rows of KVCache.token_rows
    decodes: DecodeRows | None
    chunks: list[ChunkRow]


def decode_mask(
    rows: DecodeRows, window: int | None, padded_len: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """[rows, 1, 1, padded_len], or None where no row needs one; built once per step and window."""
    if window in rows.masks:
        return rows.masks[window]
    mask = None
    needs_window = window is not None and rows.max_context_len > window
    if rows.num_rows > 1 or needs_window:
        positions = torch.arange(padded_len, device=rows.context_lens.device)
        ends = rows.context_lens[:, None]
        is_hidden = positions >= ends
        if window is not None:
            is_hidden |= positions < ends - window
        mask = _additive(is_hidden, dtype)[:, None, None]
    rows.masks[window] = mask
    return mask


def chunk_mask(
    chunk: ChunkRow, window: int | None, device: torch.device, dtype: torch.dtype
) -> torch.Tensor | None:
    """[num_tokens, context], built once per step and window."""
    if window not in chunk.masks:
        context_len = chunk.context_start + chunk.num_tokens
        positions = torch.arange(context_len, device=device)
        own = positions[chunk.context_start :, None]
        is_hidden = positions > own
        if window is not None:
            is_hidden |= positions <= own - window
        chunk.masks[window] = _additive(is_hidden, dtype)
    return chunk.masks[window]


def _additive(is_hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
    return mask.masked_fill_(is_hidden, float("-inf"))
