"""The KV tensor: one slab per block, so that a block hands over without a gather."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.shared_memory import SharedMemory

logger = logging.getLogger(__name__)

LAYOUT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """Shape and kind of one model's KV."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str  # such as "bfloat16"
    device: str  # such as "cpu" or "cuda:0"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of `dtype`."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.torch_dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block."""
        return self.bytes_per_token * self.block_size


class KVCache:
    """Owns the KV memory of one rank. Invariant: the padding block is all zeros, always."""

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        *,
        is_shared: bool = False,
        has_scratch_block: bool = False,
    ) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        # One block more than the pool knows: rows of a batch that are shorter than the longest
        # read it. It is outside `tensor`, so nobody can write it.
        self.padding_block_id = num_blocks
        # And one that rows of nobody write and read, where batches are filled up with such.
        self.scratch_block_id = num_blocks + 1 if has_scratch_block else None
        self._num_extra_blocks = 2 if has_scratch_block else 1
        shape = (
            num_blocks + self._num_extra_blocks,
            spec.num_layers,
            2,
            spec.block_size,
            spec.num_kv_heads,
            spec.head_dim,
        )
        # What other processes of this host may map: [num_blocks + 1, ..], as it lies.
        self.shared_memory: SharedMemory | None = None
        if is_shared:
            self.shared_memory = _allocate_shared(math.prod(shape) * spec.torch_dtype.itemsize)
        if self.shared_memory is not None:
            storage = self.shared_memory.tensor(shape, spec.torch_dtype)
        else:
            storage = torch.zeros(shape, dtype=spec.torch_dtype, device=spec.device)
        # Shape [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]; block-major.
        self.tensor = storage[:num_blocks]
        # One row per token, layer and K or V: [.., num_kv_heads * head_dim]
        self.token_rows = storage.view(-1, spec.num_kv_heads * spec.head_dim)
        # One row per block, layer and K or V: [.., block_size * num_kv_heads * head_dim]
        self.slab_rows = storage.view(-1, spec.block_size * spec.num_kv_heads * spec.head_dim)
        self._storage = storage
        self._scratch = storage.new_empty(0)

    @property
    def buffer_bytes(self) -> int:
        """Memory beside the pool: blocks outside it and what gathers have needed so far."""
        return self._num_extra_blocks * self.spec.bytes_per_block + self._scratch.nbytes

    def layer_blocks(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each [blocks, block_size, num_kv_heads, head_dim]."""
        return self._storage[:, layer, 0], self._storage[:, layer, 1]

    def layer_rows(self, layer: int) -> torch.Tensor:
        """`token_rows` from a layer's first row on: a token's place is the same in all layers."""
        return self.token_rows[2 * layer * self.spec.block_size :]

    def zero_index(self, index: torch.Tensor) -> None:
        """`zero` for block ids that are on the device, [n] int64; the scratch block may be one."""
        self._storage.index_fill_(0, index, 0)

    def zero(self, block_ids: list[int]) -> None:
        """Wipe blocks before they get a new owner.

        Attention reads whole blocks and masks what is not the request's own; a masked NaN left by
        an earlier owner would still poison the sum.
        """
        if block_ids:
            self.zero_index(torch.tensor(block_ids, device=self.tensor.device))

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, each pair from the first to the second."""
        if copies:
            sources, targets = torch.tensor(copies, device=self.tensor.device).T
            self.tensor[targets] = self.tensor[sources]

    def scratch(self, num_slabs: int) -> torch.Tensor:
        """Memory for a gather, [num_slabs, slab], valid until the next call."""
        width = self.slab_rows.shape[1]
        if self._scratch.numel() < num_slabs * width:
            # Grown in big steps: fresh pages cost three times the copy itself.
            self._scratch = self.slab_rows.new_empty(2 * num_slabs * width)
        return self._scratch[: num_slabs * width].view(num_slabs, width)


def _allocate_shared(num_bytes: int) -> SharedMemory | None:
    """Memory that others may map; None where the system has none of this kind, or no more."""
    try:
        return SharedMemory(num_bytes)
    except (OSError, AttributeError) as error:
        logger.warning("no shared memory for the KV pool, so it is private: %s", error)
        return None
