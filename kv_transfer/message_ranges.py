"""Ranges over messages: straight from and into pool blocks where they lie as they travel.

A range travels as pieces, all posted as soon as there is room for them, so that the link never
idles. A piece that lies in one piece at this end needs no copy here. The others go through buffers
of the link; so does everything between a GPU and its link: a kernel of NCCL whose abort hangs may
write long after its operation was given up, and then it spoils a buffer, not the pool. What Gloo
was told to receive it writes no more once `wait` has returned or raised.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kv_transfer.backend import Operation
from kv_transfer.layout import KVLayout, Piece, split_range
from kv_transfer.pool_blocks import PoolBlocks
from kv_transfer.range_mover import Alter, RangeOrder

# Enough pieces in flight to hide what posting and waiting cost.
_MAX_POSTED = _NUM_BUFFERS = 6
# All buffers together stay in the last-level cache. A block of half this size or more is a piece of
# its own, so that it never has to be gathered.
PIECE_BYTES = 1 << 20


class PostingLink(Protocol):
    """The verbs of a link that an operation needs; called on the link's thread."""

    device: torch.device

    def send(self, tensor: torch.Tensor) -> Operation:
        """Post a contiguous tensor of bytes."""

    def receive(self, tensor: torch.Tensor) -> Operation:
        """Post a buffer of bytes."""

    def abort(self, reason: str) -> None:
        """End the link: posted operations raise at both ends."""


@dataclass(slots=True)
class _Posted:
    """A piece on its way."""

    piece: Piece
    message: torch.Tensor
    operation: Operation
    # the buffer it occupies, None when it lies in the pool itself
    buffer: torch.Tensor | None


class MessageRanges:
    """One link's way to a pool.

    Invariant: used by one operation at a time, on the link's thread.
    """

    def __init__(self, pool: torch.Tensor, *, ours: KVLayout, theirs: KVLayout) -> None:
        self._blocks = PoolBlocks(pool, ours)
        self._layout = ours
        self._peer_block_size = theirs.block_size
        can_use_slabs = ours.block_size == theirs.block_size
        unit = ours.bytes_per_block if can_use_slabs else ours.bytes_per_token
        self._buffer_bytes = max(PIECE_BYTES, unit)
        self._buffers: list[torch.Tensor] = []
        self._num_buffers = 0

    def send_range(self, link: PostingLink, order: RangeOrder, *, alter: Alter | None) -> int:
        """Send a range; returns the bytes. `alter` may spoil each piece (fault injection).

        When it returns or raises, nothing reads the pool blocks any more.
        """

        def post(piece: Piece) -> _Posted:
            in_place = None if alter else self._in_place(order, piece, link.device)
            if in_place is not None:
                return _Posted(piece, in_place, link.send(in_place), None)
            buffer = self._take_buffer(link.device)
            message = buffer[: piece.num_bytes]
            self._blocks.gather(*_where(order, piece), message, as_slabs=piece.as_slabs)
            self._synchronize()
            if alter:
                alter(message)
            return _Posted(piece, message, link.send(message), buffer)

        return self._run(link, order, post, lambda _posted: None)

    def receive_range(
        self, link: PostingLink, order: RangeOrder, *, alter: Alter | None, is_wanted: bool
    ) -> int:
        """Receive a range into the blocks, or let it pass by when it is not wanted any more.

        When it returns or raises, nothing writes the pool blocks or the buffers any more.
        """

        def post(piece: Piece) -> _Posted:
            in_place = self._in_place(order, piece, link.device) if is_wanted else None
            # see above
            if in_place is not None and link.device.type == "cpu":
                return _Posted(piece, in_place, link.receive(in_place), None)
            buffer = self._take_buffer(link.device)
            message = buffer[: piece.num_bytes]
            return _Posted(piece, message, link.receive(message), buffer)

        def finish(posted: _Posted) -> None:
            if alter:
                alter(posted.message)
            if is_wanted and posted.buffer is not None:
                piece = posted.piece
                where = _where(order, piece)
                self._blocks.scatter(*where, posted.message, as_slabs=piece.as_slabs)
                self._synchronize()

        return self._run(link, order, post, finish)

    def _run(
        self,
        link: PostingLink,
        order: RangeOrder,
        post: Callable[[Piece], _Posted],
        finish: Callable[[_Posted], None],
    ) -> int:
        deadline = time.monotonic() + order.timeout_s
        posted: deque[_Posted] = deque()
        try:
            for piece in self._pieces(order):
                while posted and (len(posted) >= _MAX_POSTED or not self._has_buffer()):
                    self._complete_oldest(posted, deadline, finish)
                posted.append(post(piece))
            while posted:
                self._complete_oldest(posted, deadline, finish)
        except BaseException as error:
            # the peer posts all pieces, so an operation ends whole or with its link
            link.abort(f"operation failed: {error}")
            _drain([each.operation for each in posted], deadline)
            raise
        return (order.token_end - order.token_start) * self._layout.bytes_per_token

    def _pieces(self, order: RangeOrder) -> Iterator[Piece]:
        return split_range(
            order.token_start,
            order.token_end,
            layout=self._layout,
            peer_block_size=self._peer_block_size,
            max_bytes=PIECE_BYTES,
        )

    def _complete_oldest(
        self, posted: deque[_Posted], deadline: float, finish: Callable[[_Posted], None]
    ) -> None:
        oldest = posted[0]
        oldest.operation.wait(max(deadline - time.monotonic(), 0.001))
        posted.popleft()
        finish(oldest)
        if oldest.buffer is not None:
            self._buffers.append(oldest.buffer)

    def _in_place(
        self, order: RangeOrder, piece: Piece, device: torch.device
    ) -> torch.Tensor | None:
        if self._blocks.device.type != device.type:
            return None
        return self._blocks.in_place(*_where(order, piece), as_slabs=piece.as_slabs)

    def _has_buffer(self) -> bool:
        return bool(self._buffers) or self._num_buffers < _NUM_BUFFERS

    def _take_buffer(self, device: torch.device) -> torch.Tensor:
        if self._buffers:
            return self._buffers.pop()
        self._num_buffers += 1
        # pinned, so that copies between device and host need no extra staging of the driver's
        is_pinned = device.type == "cpu" and self._blocks.device.type == "cuda"
        return torch.empty(
            self._buffer_bytes, dtype=torch.uint8, device=device, pin_memory=is_pinned
        )

    def _synchronize(self) -> None:
        if self._blocks.device.type == "cuda":
            torch.cuda.current_stream(self._blocks.device).synchronize()


def _where(order: RangeOrder, piece: Piece) -> tuple[Sequence[int], int, int]:
    return order.block_ids, piece.token_start, piece.token_end


def _drain(operations: Sequence[Operation], deadline: float) -> None:
    for operation in operations:
        try:
            operation.wait(max(deadline - time.monotonic(), 0.001))
        except Exception:  # noqa: BLE001 - the first failure is the one that is reported
            continue
