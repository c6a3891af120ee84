"""Ranges over shared memory: one copy, from the peer's mapped blocks into our own.

    peer's blocks   |    block 7    |    block 2    |        block size 32, tokens [24, 56)
    tokens          0      24       32      48   56 64
    our blocks      |   9   |   4   |   0   |   5   |        block size 16
                        [---|-------|-------|----)           segments end where a block of either
                                                             side ends
Equal layouts copy runs of whole blocks at once.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kv_transfer.backend import LinkBrokenError
from kv_transfer.layout import KVLayout, block_range
from kv_transfer.link import Link
from kv_transfer.shared_memory_channel import Pages, SharedMemoryChannel
from kv_transfer.staging import RangeOrder

# A pool as bytes: [num_blocks, num_layers * 2, block_size, bytes of a token in one layer's K or V].
Blocks = npt.NDArray[np.uint8]

# A moment's copy.
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that lie side by side in one block of each side, or `num_blocks` whole blocks."""

    source_block: int
    source_offset: int
    target_block: int
    target_offset: int
    num_tokens: int
    # 0: a part of a block
    num_blocks: int = 0


class MappedRanges:
    """Lends ranges of our pool, or copies what the peer lends. Used on the link's thread."""

    def __init__(self, pool: torch.Tensor, *, ours: KVLayout, theirs: KVLayout) -> None:
        self._pool = _as_blocks(pool.view(torch.uint8).view(-1).numpy(), ours)
        self._ours = ours
        self._theirs = theirs

    def send_range(
        self, link: Link, order: RangeOrder, *, alter: Callable[[torch.Tensor], None] | None
    ) -> int:
        """Lend a range until the peer has read it; returns the bytes.

        When it raises the peer may still read the blocks: until `wait_unread` of the link.
        """
        first, end = block_range(order.token_start, order.token_end, self._ours.block_size)
        block_ids = order.block_ids[first:end]
        if alter:
            # No bytes of ours travel that could be spoilt: the peer is sent to the wrong blocks.
            block_ids = [(block_id + 1) % self._pool.shape[0] for block_id in block_ids]
        deadline = time.monotonic() + order.timeout_s
        try:
            channel = link.shared_memory
            channel.lend(block_ids, order.timeout_s)
            channel.wait_given_back(deadline - time.monotonic())
        except BaseException as error:
            link.abort(f"operation failed: {error}")
            raise
        return (order.token_end - order.token_start) * self._ours.bytes_per_token

    def receive_range(
        self,
        link: Link,
        order: RangeOrder,
        *,
        alter: Callable[[torch.Tensor], None] | None,
        write: Callable[[Callable[[], None]], None],
    ) -> int:
        """Copy a range the peer lends; each piece goes through `write`, which may skip it.

        When it returns or raises, nothing reads the peer's blocks or writes ours any more.
        """
        try:
            channel = link.shared_memory
            self._copy_all(order, channel, channel.borrow(order.timeout_s), write)
            if alter:
                write(lambda: self._spoil(order, alter))
            channel.give_back()
        except BaseException as error:
            link.abort(f"operation failed: {error}")
            raise
        return (order.token_end - order.token_start) * self._ours.bytes_per_token

    def _copy_all(
        self,
        order: RangeOrder,
        channel: SharedMemoryChannel,
        borrowed: Sequence[int],
        write: Callable[[Callable[[], None]], None],
    ) -> None:
        # Here alone is a view of the mapping, so that no error on its way up keeps it.
        assert channel.memory is not None, "only the decode side reads"
        source = _as_blocks(channel.memory, self._theirs)
        first, end = block_range(order.token_start, order.token_end, self._theirs.block_size)
        if len(borrowed) != end - first or max(borrowed) >= len(source):
            del source
            raise LinkBrokenError("the peer lends blocks that make no sense")
        for start, stop in self._pieces(order):
            write(lambda: self._copy(order, source, borrowed, (start, stop)))  # noqa: B023

    def _pieces(self, order: RangeOrder) -> Iterator[tuple[int, int]]:
        """Cut the range, so that whoever waits for `write` waits for a moment only."""
        grid = max(1, _PIECE_BYTES // self._ours.bytes_per_block) * self._ours.block_size
        start = order.token_start
        while start < order.token_end:
            stop = min((start // grid + 1) * grid, order.token_end)
            yield start, stop
            start = stop

    def _copy(
        self,
        order: RangeOrder,
        source: Blocks,
        borrowed: Sequence[int],
        tokens: tuple[int, int],
    ) -> None:
        first = order.token_start // self._theirs.block_size
        for each in _segments(
            tokens,
            source_size=self._theirs.block_size,
            target_size=self._ours.block_size,
            source_of=lambda index: borrowed[index - first],
            target_of=order.block_ids.__getitem__,
        ):
            if each.num_blocks:
                read = source[each.source_block : each.source_block + each.num_blocks]
                ours = self._pool[each.target_block : each.target_block + each.num_blocks]
            else:
                start, stop = each.source_offset, each.source_offset + each.num_tokens
                read = source[each.source_block, :, start:stop]
                start, stop = each.target_offset, each.target_offset + each.num_tokens
                ours = self._pool[each.target_block, :, start:stop]
            # numpy copies runs of bytes faster than torch, and like it without the interpreter
            np.copyto(ours, read)

    def _spoil(self, order: RangeOrder, alter: Callable[[torch.Tensor], None]) -> None:
        """Spoil the first token that arrived."""
        block, offset = divmod(order.token_start, self._ours.block_size)
        token = self._pool[order.block_ids[block], :, offset]
        spoilt = torch.from_numpy(token.copy())
        alter(spoilt.view(-1))
        np.copyto(token, spoilt.numpy())


def _as_blocks(memory: Pages, layout: KVLayout) -> Blocks:
    """View a pool; a padding block at its end is a block like the others."""
    num_blocks = len(memory) // layout.bytes_per_block
    blocks = memory[: num_blocks * layout.bytes_per_block]
    return blocks.reshape(num_blocks, 2 * layout.num_layers, layout.block_size, -1)


def _segments(
    tokens: tuple[int, int],
    *,
    source_size: int,
    target_size: int,
    source_of: Callable[[int], int],
    target_of: Callable[[int], int],
) -> Iterator[Segment]:
    """Cut [start, end) where a block of either side ends, and join whole blocks side by side."""
    position, end = tokens
    run: Segment | None = None
    while position < end:
        source_index, source_offset = divmod(position, source_size)
        target_index, target_offset = divmod(position, target_size)
        room = min(source_size - source_offset, target_size - target_offset, end - position)
        is_whole = source_size == target_size == room
        segment = Segment(
            source_of(source_index),
            source_offset,
            target_of(target_index),
            target_offset,
            room,
            1 if is_whole else 0,
        )
        position += room
        joined = _join(run, segment)
        if joined is None and run is not None:
            yield run
        run = joined or segment
    if run is not None:
        yield run


def _join(run: Segment | None, then: Segment) -> Segment | None:
    """Both as one, when they are whole blocks that lie side by side in both pools."""
    if run is None or not run.num_blocks or not then.num_blocks:
        return None
    follows = (
        then.source_block == run.source_block + run.num_blocks
        and then.target_block == run.target_block + run.num_blocks
    )
    if not follows:
        return None
    return Segment(
        run.source_block,
        0,
        run.target_block,
        0,
        run.num_tokens + then.num_tokens,
        run.num_blocks + 1,
    )
