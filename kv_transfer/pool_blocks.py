"""A pool as bytes, and the copies between its blocks and messages in canonical layout."""

from collections.abc import Iterator, Sequence

import torch

from kv_transfer.layout import KVLayout, block_range


class PoolBlocks:
    """Byte views of one pool [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]."""

    def __init__(self, pool: torch.Tensor, layout: KVLayout) -> None:
        self.device = pool.device
        self._block_size = layout.block_size
        # [num_blocks, bytes of a block]
        self._slabs = pool.view(torch.uint8).view(len(pool), -1)
        self._bytes = self._slabs.view(-1)
        self._block_bytes = layout.bytes_per_block
        # [num_blocks, num_layers * 2, block_size, bytes of a token in one layer's K or V]
        self._parts = self._slabs.view(len(pool), 2 * layout.num_layers, layout.block_size, -1)

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
        if count > 1 and not (
            as_slabs and list(block_ids[first:end]) == list(range(block_id, block_id + count))
        ):
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
        for staged, part in self._pairs(block_ids, start, end, message, as_slabs=as_slabs):
            staged.copy_(part)

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
        for staged, part in self._pairs(block_ids, start, end, message, as_slabs=as_slabs):
            part.copy_(staged)

    def _pairs(
        self,
        block_ids: Sequence[int],
        start: int,
        end: int,
        message: torch.Tensor,
        *,
        as_slabs: bool,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each part of a message beside the part of the pool it stands for.

        tokens   32      40            64    70            96      [40, 70), block_size 32:
        block     |-----------1---------|-----------2------|       8 to 32 of block 1,
                          [-------------)[----)                    0 to 6 of block 2
        """
        size = self._block_size
        first, last = block_range(start, end, size)
        if as_slabs:
            slabs = message.view(last - first, -1)
            for index in range(first, last):
                yield slabs[index - first], self._slabs[block_ids[index]]
            return
        # [num_layers * 2, tokens, bytes of a token in one layer's K or V]
        tokens = message.view(self._parts.shape[1], end - start, -1)
        for index in range(first, last):
            at, stop = max(start, index * size), min(end, (index + 1) * size)
            offset = at - index * size
            part = self._parts[block_ids[index], :, offset : offset + stop - at]
            yield tokens[:, at - start : stop - start], part


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
