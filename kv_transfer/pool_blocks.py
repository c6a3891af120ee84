"""A pool as bytes, and the copies between its blocks and messages in canonical layout."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from kv_transfer.layout import KVLayout, block_range


class PoolBlocks:
    """Byte views of one pool [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim].

    One for all links of a worker; nothing of it changes, so any thread may use it.
    """

    def __init__(self, pool: torch.Tensor, layout: KVLayout) -> None:
        self.device = pool.device
        self.layout = layout
        self._block_size = layout.block_size
        self._block_bytes = layout.bytes_per_block
        slabs = pool.view(torch.uint8).view(len(pool), -1)
        self._bytes = slabs.view(-1)
        # made ahead: cutting one out costs a link more than posting it
        self._slabs = slabs.unbind()
        # [num_blocks, num_layers * 2, block_size * bytes of a token in one layer's K or V]
        self.rows = _by_numpy(slabs.view(len(pool), layout.rows_per_block, layout.bytes_per_row))

    def in_place(
        self, block_ids: Sequence[int], token_start: int, token_end: int, *, as_slabs: bool
    ) -> torch.Tensor | None:
        """The bytes of a range where they lie in the order in which they travel, else None.

        One whole block lies as canonical layout has it; several do as slabs, side by side.
        """
        size = self._block_size
        if token_start % size or token_end % size:
            return None
        first, end = token_start // size, token_end // size
        block_id, count = block_ids[first], end - first
        if count == 1:
            return self._slabs[block_id]
        if not as_slabs or list(block_ids[first:end]) != list(range(block_id, block_id + count)):
            return None
        return self._bytes[block_id * self._block_bytes : (block_id + count) * self._block_bytes]

    def gather(
        self,
        block_ids: Sequence[int],
        start: int,
        end: int,
        message: torch.Tensor,
        *,
        as_slabs: bool,
    ) -> None:
        """Copy tokens [start, end) into a message."""
        for staged, rows in self._pairs(block_ids, start, end, message, as_slabs=as_slabs):
            _copy(staged, rows)

    def scatter(
        self,
        block_ids: Sequence[int],
        start: int,
        end: int,
        message: torch.Tensor,
        *,
        as_slabs: bool,
    ) -> None:
        """Copy a message into the blocks of tokens [start, end)."""
        for staged, rows in self._pairs(block_ids, start, end, message, as_slabs=as_slabs):
            _copy(rows, staged)

    def _pairs(
        self,
        block_ids: Sequence[int],
        start: int,
        end: int,
        message: torch.Tensor,
        *,
        as_slabs: bool,
    ) -> Iterator[tuple[Any, Any]]:
        """Yield each part of a message beside the part of the pool it stands for.

        tokens   32      40            64    70            96      [40, 70), block_size 32:
        block     |-----------1---------|-----------2------|       8 to 32 of block 1,
                          [-------------)[----)                    0 to 6 of block 2
        """
        size, width = self._block_size, self.layout.bytes_per_row_token
        first, last = block_range(start, end, size)
        staged = _by_numpy(message) if self.device.type == "cpu" else message
        if as_slabs:
            slabs = staged.reshape(last - first, *self.rows.shape[1:])
            for index in range(first, last):
                yield slabs[index - first], self.rows[block_ids[index]]
            return
        # [num_layers * 2, tokens * bytes of a token in one layer's K or V]
        tokens = staged.reshape(self.rows.shape[1], -1)
        for index in range(first, last):
            at, stop = max(start, index * size), min(end, (index + 1) * size)
            from_token, to_token = at - index * size, stop - index * size
            rows = self.rows[block_ids[index], :, from_token * width : to_token * width]
            yield tokens[:, (at - start) * width : (stop - start) * width], rows


def _by_numpy(tensor: torch.Tensor) -> Any:
    """The same bytes as an array where they lie on the CPU: numpy copies rows in a fraction of the
    time that torch takes to begin, and a link's thread finds nothing of either in its caches."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def _copy(target: Any, source: Any) -> None:
    if isinstance(target, np.ndarray):
        np.copyto(target, source)
    else:
        target.copy_(source)


def block_parts(
    pool: torch.Tensor, block_ids: Sequence[int], token_start: int, token_end: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield (start, end, view) for each block that holds a part of [token_start, token_end).

    The view is [num_layers, 2, end - start, num_kv_heads, head_dim].
    """
    block_size = pool.shape[3]
    first, end_block = block_range(token_start, token_end, block_size)
    for index in range(first, end_block):
        start = max(token_start, index * block_size)
        end = min(token_end, (index + 1) * block_size)
        offset = start - index * block_size
        yield start, end, pool[block_ids[index], :, :, offset : offset + end - start]
