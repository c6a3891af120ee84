"""Where the KV of a step's requests lies, for attention that gathers it, and what is hidden."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.kv_cache import KVCache
from engine.schedule import ScheduledRequest


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


def decode_rows(scheduled: list[ScheduledRequest], kv_cache: KVCache) -> DecodeRows | None:
    """The requests with one token, all together."""
    if not scheduled:
        return None
    block_size = kv_cache.spec.block_size
    context_lens = [entry.end for entry in scheduled]
    num_blocks = -(-max(context_lens) // block_size)
    table: list[int] = []
    for entry in scheduled:
        own = entry.request.block_ids[: min(-(-entry.end // block_size), num_blocks)]
        table += own
        table += [kv_cache.padding_block_id] * (num_blocks - len(own))
    device = kv_cache.tensor.device
    return DecodeRows(
        num_rows=len(scheduled),
        context_lens=torch.tensor(context_lens, device=device),
        max_context_len=max(context_lens),
        slab_index=_slab_index(kv_cache, torch.tensor(table, device=device)),
    )


def chunk_rows(scheduled: Sequence[ScheduledRequest], kv_cache: KVCache) -> list[ChunkRow]:
    """The requests with more, one by one."""
    chunks: list[ChunkRow] = []
    token_start = 0
    for entry in scheduled:
        assert entry.num_tokens > 1 or not chunks, "requests with one token come first"
        if entry.num_tokens > 1:
            own = entry.request.block_ids[: -(-entry.end // kv_cache.spec.block_size)]
            index = torch.tensor(own, device=kv_cache.tensor.device)
            chunks.append(
                ChunkRow(
                    token_start=token_start,
                    num_tokens=entry.num_tokens,
                    context_start=entry.start,
                    slab_index=_slab_index(kv_cache, index),
                )
            )
        token_start += entry.num_tokens
    return chunks


def write_index(scheduled: Sequence[ScheduledRequest], kv_cache: KVCache) -> torch.Tensor:
    """Rows of KVCache.token_rows, [num_layers, 2 * num_tokens]: keys, then values."""
    block_size = kv_cache.spec.block_size
    places = [
        (entry.request.block_ids[position // block_size], position % block_size)
        for entry in scheduled
        for position in range(entry.start, entry.end)
    ]
    placed = torch.tensor(places, device=kv_cache.tensor.device)
    slabs = _slab_index(kv_cache, placed[:, 0])  # [num_layers, 2 * num_tokens]
    return slabs * block_size + placed[:, 1].repeat(2)


def _slab_index(kv_cache: KVCache, block_ids: torch.Tensor) -> torch.Tensor:
    """Rows of KVCache.slab_rows, [num_layers, 2 * num_blocks]: keys, then values."""
    num_layers = kv_cache.spec.num_layers
    planes = torch.arange(2 * num_layers, device=block_ids.device).view(num_layers, 2, 1)
    return (block_ids * (2 * num_layers) + planes).view(num_layers, -1)


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
