"""Attention by our own C++: it reads the KV blocks where they lie, decodes and chunks alike."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kv_cache import KVCache
from engine.layer_attention import LayerAttention
from engine.schedule import ScheduledRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeAttention:
    """Attention of one step on a CPU, see `engine/native/paged_attention.cpp`."""

    kv_cache: KVCache
    block_table: torch.Tensor  # [num_rows, blocks of the longest] int32; behind its own: any
    row_starts: torch.Tensor  # [num_rows + 1] int32: first token of each in the packed row
    context_lens: torch.Tensor  # [num_rows] int32: tokens to attend to, this step's included

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What the library needs of a step, whichever layer it is."""
        return self.kv_cache.tensor, self.block_table, self.row_starts, self.context_lens

    @classmethod
    def plan(cls, scheduled: Sequence[ScheduledRequest], kv_cache: KVCache) -> "NativeAttention":
        """What a step with these requests needs, in the order of the packed row."""
        block_size = kv_cache.spec.block_size
        own = [entry.request.block_ids[: -(-entry.end // block_size)] for entry in scheduled]
        longest = max(map(len, own))
        table = [block_ids + [0] * (longest - len(block_ids)) for block_ids in own]
        row_starts = [0]
        for entry in scheduled:
            row_starts.append(row_starts[-1] + entry.num_tokens)
        return cls(
            kv_cache=kv_cache,
            block_table=torch.tensor(table, dtype=torch.int32),
            row_starts=torch.tensor(row_starts, dtype=torch.int32),
            context_lens=torch.tensor([entry.end for entry in scheduled], dtype=torch.int32),
        )

    def attend(
        self,
        layer: LayerAttention,
        query: torch.Tensor,  # [num_heads, num_tokens, head_dim]
        key: torch.Tensor,  # [num_kv_heads, num_tokens, head_dim]
        value: torch.Tensor,  # [num_kv_heads, num_tokens, value_dim]
    ) -> torch.Tensor:
        """Keep keys and values, then attend; [num_tokens, num_heads, value_dim]."""
        attended: torch.Tensor = torch.ops.relevo.paged_attention.default(
            _heads_whole(query.transpose(0, 1)),
            _heads_whole(key.transpose(0, 1)),
            _heads_whole(value.transpose(0, 1)),
            self.kv_cache.tensor,
            layer.index,
            self.block_table,
            self.row_starts,
            self.context_lens,
            layer.scaling,
            layer.window or 0,
            layer.softcap or 0.0,
            layer.sinks,
        )
        return attended


def _heads_whole(heads: torch.Tensor) -> torch.Tensor:
    """The numbers of a head side by side, as nearly every model has them."""
    return heads if heads.stride(-1) == 1 else heads.contiguous()
