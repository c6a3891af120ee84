"""Ranges over shared memory: one copy, from the peer's mapped blocks into our own.

    peer's blocks   |    block 7    |    block 2    |        block size 32, tokens [24, 56)
    tokens          0      24       32      48   56 64
    our blocks      |   9   |   4   |   0   |   5   |        block size 16
                        [---|-------|-------|----)           segments end where a block of either
                                                             side ends
Of equal layouts whole blocks are copied as they lie, a last one too when half of it is meant.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kv_transfer.backend import LinkBrokenError
from kv_transfer.layout import KVLayout, whole_blocks
from kv_transfer.link import Link
from kv_transfer.pool_blocks import PoolBlocks
from kv_transfer.range_mover import Alter, RangeOrder
from kv_transfer.shared_memory_channel import SharedMemoryChannel

# Bytes of a pool: [num_blocks, bytes of a block].
Slabs = npt.NDArray[np.uint8]


class Segment(NamedTuple):
    """What is copied out of one of the lent blocks."""

    lent_index: int
    # of the peer's block; None for all of it
    tokens: slice | None
    # bytes of our pool, in the shape of the source
    target: npt.NDArray[np.uint8]


class MappedRanges:
    """Waits until the peer has read a range of our pool, or copies what the peer lends.

    Used on the link's thread.
    """

    def __init__(self, blocks: PoolBlocks, *, theirs: KVLayout) -> None:
        self._rows: Slabs = blocks.rows
        # [num_blocks, num_layers * 2, block_size, bytes of a token in one layer's K or V]
        self._parts: npt.NDArray[np.uint8] = blocks.parts
        self._their_parts = (2 * theirs.num_layers, theirs.block_size, -1)
        self._ours = blocks.layout
        self._theirs = theirs
        self._bytes_per_token = blocks.layout.bytes_per_token
        self._bytes_per_block = theirs.bytes_per_block

    def prepare(self, order: RangeOrder) -> None:
        """Find out what goes where, but for the peer's blocks; on any thread."""
        order.plan = self._cut(order)

    def send_range(self, link: Link, order: RangeOrder, *, alter: Alter | None) -> int:
        """Wait until the peer has read a range it was told of; returns the bytes.

        When it raises the peer may still read the blocks: until `wait_unread` of the link.
        """
        assert alter is None, "nothing travels that could be spoilt"
        try:
            link.shared_memory.wait_given_back(order.timeout_s)
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
            if is_wanted:
                self._copy_all(order, channel)
                if alter:
                    self._spoil(order, alter)
        except BaseException as error:
            link.abort(f"operation failed: {error}")
            raise
        return (order.token_end - order.token_start) * self._bytes_per_token

    def _copy_all(self, order: RangeOrder, channel: SharedMemoryChannel) -> None:
        # Here alone is a view of the mapping, so that no error on its way up keeps it.
        source = channel.slabs(self._bytes_per_block)
        lent = order.lent
        num_blocks = self._theirs.blocks_of(order.token_start, order.token_end)
        if len(lent) != num_blocks or max(lent) >= len(source):
            del source
            raise LinkBrokenError("the peer lends blocks that make no sense")
        for segment in order.plan or self._cut(order):
            block = source[lent[segment.lent_index]]
            if segment.tokens is not None:
                block = block.reshape(self._their_parts)[:, segment.tokens]
            # numpy copies runs of bytes faster than torch, and like it without the interpreter
            np.copyto(segment.target, block)

    def _cut(self, order: RangeOrder) -> list[Segment]:
        """Segments that end where a block of either side ends."""
        theirs, ours = self._theirs.block_size, self._ours.block_size
        first, end = whole_blocks(order.token_start, order.token_end, ours)
        whole = range(first, end) if ours == theirs else ()
        segments: list[Segment] = []
        position, lent_from = order.token_start, order.token_start // theirs
        while position < order.token_end:
            index, source_at = position // theirs - lent_from, position % theirs
            target_index, target_at = divmod(position, ours)
            block_id = order.block_ids[target_index]
            if target_index in whole:
                segments.append(Segment(index, None, self._rows[block_id]))
                position += ours
                continue
            count = min(theirs - source_at, ours - target_at, order.token_end - position)
            target = self._parts[block_id, :, target_at : target_at + count]
            segments.append(Segment(index, slice(source_at, source_at + count), target))
            position += count
        return segments

    def _spoil(self, order: RangeOrder, alter: Alter) -> None:
        """Spoil the first token that arrived."""
        block, offset = divmod(order.token_start, self._ours.block_size)
        token = self._parts[order.block_ids[block], :, offset]
        spoilt = torch.from_numpy(token.copy())
        alter(spoilt.view(-1))
        np.copyto(token, spoilt.numpy())
