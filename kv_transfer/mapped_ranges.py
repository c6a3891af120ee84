"""Ranges over shared memory: one copy, from the peer's mapped blocks into our own.

    peer's blocks   |    block 7    |    block 2    |        block size 32, tokens [24, 56)
    tokens          0      24       32      48   56 64
    our blocks      |   9   |   4   |   0   |   5   |        block size 16
                        [---|-------|-------|----)           segments end where a block of either
                                                             side ends
Of equal layouts whole blocks that lie side by side are copied at once, and a last block with them
when at least half of it is meant.
"""

import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kv_transfer.backend import LinkBrokenError
from kv_transfer.layout import KVLayout, block_range, whole_blocks
from kv_transfer.link import Link
from kv_transfer.pool_blocks import PoolBlocks
from kv_transfer.range_mover import Alter, RangeOrder
from kv_transfer.shared_memory_channel import SharedMemoryChannel

# Bytes of a pool: [num_blocks, bytes of a block].
Slabs = npt.NDArray[np.uint8]


class MappedRanges:
    """Lends ranges of our pool, or copies what the peer lends. Used on the link's thread."""

    def __init__(self, blocks: PoolBlocks, *, theirs: KVLayout) -> None:
        self._pool: Slabs = blocks.rows
        self._ours = blocks.layout
        self._theirs = theirs
        self._bytes_per_token = blocks.layout.bytes_per_token
        self._bytes_per_block = theirs.bytes_per_block

    def send_range(self, link: Link, order: RangeOrder, *, alter: Alter | None) -> int:
        """Lend a range until the peer has read it; returns the bytes.

        When it raises the peer may still read the blocks: until `wait_unread` of the link.
        """
        first, end = block_range(order.token_start, order.token_end, self._ours.block_size)
        block_ids = order.block_ids[first:end]
        if alter:
            # No bytes of ours travel that could be spoilt: the peer is sent to the wrong blocks.
            block_ids = [(block_id + 1) % len(self._pool) for block_id in block_ids]
        deadline = time.monotonic() + order.timeout_s
        try:
            channel = link.shared_memory
            channel.lend(block_ids, order.timeout_s)
            channel.wait_given_back(deadline - time.monotonic())
        except BaseException as error:
            link.abort(f"operation failed: {error}")
            raise
        return (order.token_end - order.token_start) * self._bytes_per_token

    def receive_range(
        self, link: Link, order: RangeOrder, *, alter: Alter | None, is_wanted: bool
    ) -> int:
        """Copy a range the peer lends, unless it is not wanted any more.

        Whoever calls gives it back afterwards. When it raises, nothing reads the peer's blocks or
        writes ours any more.
        """
        try:
            channel = link.shared_memory
            first, end = block_range(order.token_start, order.token_end, self._theirs.block_size)
            borrowed = channel.borrow(end - first, order.timeout_s)
            if is_wanted:
                self._copy_all(order, channel, borrowed)
                if alter:
                    self._spoil(order, alter)
        except BaseException as error:
            link.abort(f"operation failed: {error}")
            raise
        return (order.token_end - order.token_start) * self._bytes_per_token

    def _copy_all(
        self, order: RangeOrder, channel: SharedMemoryChannel, borrowed: Sequence[int]
    ) -> None:
        # Here alone is a view of the mapping, so that no error on its way up keeps it.
        source = channel.slabs(self._bytes_per_block)
        if max(borrowed) >= len(source):
            del source
            raise LinkBrokenError("the peer lends blocks that make no sense")
        start, end = self._whole_blocks(order)
        if order.token_start < start:
            self._copy_parts(order, source, borrowed, order.token_start, start)
        if start < end:
            size = self._ours.block_size
            read_from = borrowed[start // size - order.token_start // size :]
            write_to = order.block_ids[start // size : end // size]
            for theirs, ours, count in _runs(read_from, write_to):
                # numpy copies runs of bytes faster than torch, and like it without the interpreter
                np.copyto(self._pool[ours : ours + count], source[theirs : theirs + count])
        if end < order.token_end:
            self._copy_parts(order, source, borrowed, end, order.token_end)

    def _whole_blocks(self, order: RangeOrder) -> tuple[int, int]:
        """The tokens [start, end) of equal pools that are copied in whole blocks."""
        size = self._ours.block_size
        first, end = whole_blocks(order.token_start, order.token_end, size)
        if size == self._theirs.block_size and first < end:
            return first * size, end * size
        return order.token_end, order.token_end

    def _copy_parts(
        self, order: RangeOrder, source: Slabs, borrowed: Sequence[int], start: int, end: int
    ) -> None:
        """Copy tokens [start, end) in segments that end where a block of either side ends."""
        pools = _by_tokens(source, self._theirs), _by_tokens(self._pool, self._ours)
        position = start
        theirs, ours = self._theirs.block_size, self._ours.block_size
        first = order.token_start // theirs
        while position < end:
            source_index, source_at = divmod(position, theirs)
            target_index, target_at = divmod(position, ours)
            count = min(theirs - source_at, ours - target_at, end - position)
            np.copyto(
                pools[1][order.block_ids[target_index], :, target_at : target_at + count],
                pools[0][borrowed[source_index - first], :, source_at : source_at + count],
            )
            position += count

    def _spoil(self, order: RangeOrder, alter: Alter) -> None:
        """Spoil the first token that arrived."""
        block, offset = divmod(order.token_start, self._ours.block_size)
        token = _by_tokens(self._pool, self._ours)[order.block_ids[block], :, offset]
        spoilt = torch.from_numpy(token.copy())
        alter(spoilt.view(-1))
        np.copyto(token, spoilt.numpy())


def _by_tokens(slabs: Slabs, layout: KVLayout) -> npt.NDArray[np.uint8]:
    """View [num_blocks, num_layers * 2, block_size, bytes of a token in one layer's K or V]."""
    return slabs.reshape(len(slabs), 2 * layout.num_layers, layout.block_size, -1)


def _runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (source block, target block, count) of blocks that lie side by side on both sides."""
    count = 0
    for index in range(1, len(targets) + 1):
        count += 1
        is_last = index == len(targets)
        if (
            is_last
            or sources[index] != sources[index - 1] + 1
            or targets[index] != targets[index - 1] + 1
        ):
            yield sources[index - count], targets[index - count], count
            count = 0
