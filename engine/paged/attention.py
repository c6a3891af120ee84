"""Attention of one step by a kernel that reads the KV blocks where they lie."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by

from engine.kv_cache import KVCache
from engine.layer_attention import LayerAttention
from engine.paged.kernel import PagedKernel, PagedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedAttention:
    """Attention of one step. Decodes and chunks are one call, in the order of the packed row."""

    kv_cache: KVCache
    kernel: PagedKernel
    rows: PagedRows
    # Where keys, then values, of each token go; [2 * num_tokens] rows of the first layer's plane.
    write_index: torch.Tensor

    def attend(
        self,
        layer: LayerAttention,
        query: torch.Tensor,  # [num_heads, num_tokens, head_dim]
        key: torch.Tensor,  # [num_kv_heads, num_tokens, head_dim]
        value: torch.Tensor,  # [num_kv_heads, num_tokens, value_dim]
    ) -> torch.Tensor:
        """Keep keys and values, then attend; [num_tokens, num_heads, value_dim]."""
        value_dim = value.shape[2]
        query, key, value = (self._token_major(heads) for heads in (query, key, value))
        self.kv_cache.layer_rows(layer.index).index_copy_(
            0, self.write_index, torch.cat((key, value)).flatten(1)
        )
        keys, values = self.kv_cache.layer_blocks(layer.index)
        return self.kernel(layer, query, keys, values, self.rows)[..., :value_dim]

    def _token_major(self, heads: torch.Tensor) -> torch.Tensor:
        """[num_tokens, heads, head_dim of the cache]; zeros behind narrow heads change nothing."""
        missing = self.kv_cache.spec.head_dim - heads.shape[2]
        heads = heads.transpose(0, 1)
        return F.pad(heads, (0, missing)) if missing else heads
