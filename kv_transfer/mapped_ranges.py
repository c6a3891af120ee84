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
import torch

from engine.native.row_copy import Rows, load_row_copy
from kv_transfer.backend import LinkBrokenError
from kv_transfer.layout import KVLayout, whole_blocks
from kv_transfer.link import Link
from kv_transfer.pool_blocks import PoolBlocks
from kv_transfer.range_mover import Alter, RangeOrder
from kv_transfer.shared_memory_channel import SharedMemoryChannel

# Of what is longer than this the first bytes have left a core's own cache before the last are here:
# then it costs their reader little that they are in none, and whoever waits for them gains a third.
PAST_CACHES_BYTES = 8 << 20


class Segment(NamedTuple):
    """What is copied out of one of the lent blocks."""

    lent_index: int
    # of each row of the peer's block
    columns: slice
    # of our pool, in the shape of the source
    target: Rows


class MappedRanges:
    """Waits until the peer has read a range of our pool, or copies what the peer lends.

    Used on the link's thread.
    """

    def __init__(self, blocks: PoolBlocks, *, theirs: KVLayout) -> None:
        # [num_blocks, num_layers * 2, block_size * bytes of a token in one layer's K or V]
        self._rows = blocks.rows
        self._ours = blocks.layout
        self._theirs = theirs
        self._bytes_per_token = blocks.layout.bytes_per_token

    def prepare(self, order: RangeOrder) -> None:
        """Find out what goes where, but for the peer's blocks; on any thread."""
        order.plan = self._cut(order)

    def prepare_send(self, order: RangeOrder) -> None:
        """Nothing: the peer does it all."""

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
        source = channel.rows(self._theirs)
        lent = order.lent
        num_blocks = self._theirs.blocks_of(order.token_start, order.token_end)
        if len(lent) != num_blocks or max(lent) >= len(source):
            del source
            raise LinkBrokenError("the peer lends blocks that make no sense")
        num_bytes = (order.token_end - order.token_start) * self._bytes_per_token
        pairs = [
            (segment.target, source[lent[segment.lent_index], :, segment.columns])
            for segment in order.plan or self._cut(order)
        ]
        copy_rows = load_row_copy() if num_bytes >= PAST_CACHES_BYTES else None
        if copy_rows is not None:
            copy_rows(pairs)
            return
        for target, block in pairs:
            # numpy copies runs of bytes faster than torch, and like it without the interpreter
            np.copyto(target, block)

    def _cut(self, order: RangeOrder) -> list[Segment]:
        """Segments that end where a block of either side ends."""
        theirs, ours = self._theirs.block_size, self._ours.block_size
        size = self._ours.bytes_per_row_token
        first, end = whole_blocks(order.token_start, order.token_end, ours)
        whole = range(first, end) if ours == theirs else ()
        segments: list[Segment] = []
        position, lent_from = order.token_start, order.token_start // theirs
        while position < order.token_end:
            index, source_at = position // theirs - lent_from, position % theirs
            target_index, target_at = divmod(position, ours)
            block_id = order.block_ids[target_index]
            count = min(theirs - source_at, ours - target_at)
            if target_index not in whole:
                count = min(count, order.token_end - position)
            target = self._rows[block_id, :, target_at * size : (target_at + count) * size]
            columns = slice(source_at * size, (source_at + count) * size)
            segments.append(Segment(index, columns, target))
            position += count
        return segments

    def _spoil(self, order: RangeOrder, alter: Alter) -> None:
        """Spoil the first token that arrived."""
        block, offset = divmod(order.token_start, self._ours.block_size)
        size = self._ours.bytes_per_row_token
        token = self._rows[order.block_ids[block], :, offset * size : (offset + 1) * size]
        spoilt = torch.from_numpy(token.copy())
        alter(spoilt.view(-1))
        np.copyto(token, spoilt.numpy())
