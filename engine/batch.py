"""Scheduled requests -> the tensors of one forward."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.attention_metadata import AttentionMetadata, ChunkRow, DecodeRows
from engine.kv_cache import KVCache
from engine.schedule import ScheduledRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Input of one forward: a single row that holds the tokens of all requests."""

    token_ids: torch.Tensor  # [1, num_tokens]
    position_ids: torch.Tensor  # [1, num_tokens]
    # Tokens whose logits are wanted, [num_samples + tokens of prompts whose logprobs are]: first
    # the last one of each request that samples.
    sample_index: torch.Tensor
    num_samples: int
    attention_metadata: AttentionMetadata


def build_batch(scheduled: Sequence[ScheduledRequest], kv_cache: KVCache) -> Batch:
    """Lay the requests out in a row; those with one token must come first."""
    device = kv_cache.tensor.device
    block_size = kv_cache.spec.block_size
    token_ids: list[int] = []
    positions: list[int] = []
    block_ids: list[int] = []
    sample_index: list[int] = []
    prompt_index: list[int] = []
    for entry in scheduled:
        request, offset = entry.request, len(token_ids) - entry.start
        token_ids += request.token_ids[entry.start : entry.end]
        positions += range(entry.start, entry.end)
        block_ids += [request.block_ids[p // block_size] for p in range(entry.start, entry.end)]
        if entry.samples:
            sample_index.append(len(token_ids) - 1)
        prompt_index += [offset + position - 1 for position in entry.prompt_logprob_positions]
    position_ids = torch.tensor(positions, device=device)
    metadata = AttentionMetadata(
        kv_cache=kv_cache,
        write_index=_write_index(
            kv_cache, torch.tensor(block_ids, device=device), position_ids % block_size
        ),
        decodes=_decode_rows([e for e in scheduled if e.num_tokens == 1], kv_cache),
        chunks=_chunk_rows(scheduled, kv_cache),
    )
    return Batch(
        token_ids=torch.tensor([token_ids], device=device),
        position_ids=position_ids[None],
        sample_index=torch.tensor(sample_index + prompt_index, dtype=torch.long, device=device),
        num_samples=len(sample_index),
        attention_metadata=metadata,
    )


def _write_index(kv_cache: KVCache, block_ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows of KVCache.token_rows, [num_layers, 2 * num_tokens]: keys, then values."""
    slabs = _slab_index(kv_cache, block_ids)  # [num_layers, 2 * num_tokens]
    return slabs * kv_cache.spec.block_size + offsets.repeat(2)


def _slab_index(kv_cache: KVCache, block_ids: torch.Tensor) -> torch.Tensor:
    """Rows of KVCache.slab_rows, [num_layers, 2 * num_blocks]: keys, then values."""
    num_layers = kv_cache.spec.num_layers
    planes = torch.arange(2 * num_layers, device=block_ids.device).view(num_layers, 2, 1)
    return (block_ids * (2 * num_layers) + planes).view(num_layers, -1)


def _decode_rows(scheduled: list[ScheduledRequest], kv_cache: KVCache) -> DecodeRows | None:
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


def _chunk_rows(scheduled: Sequence[ScheduledRequest], kv_cache: KVCache) -> list[ChunkRow]:
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
