"""Ranges over messages: straight from and into pool blocks where they lie as they travel.

A range travels as pieces. Those that lie in one piece at this end need no copy here: all of them
are posted at once. Messages end in the order in which they were posted, so whoever waits for the
last one is woken once, and not once a block, by threads that need the core themselves. The others
go through buffers of the link, as many at a time as there are; so does everything between a GPU
and its link: a kernel of NCCL whose abort hangs may write long after its operation was given up,
and then it spoils a buffer, not the pool. What Gloo was told to receive it writes no more once
`wait` has returned or raised.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from kv_transfer.backend import Operation
from kv_transfer.layout import KVLayout, Piece, RangeCutter
from kv_transfer.pool_blocks import PoolBlocks
from kv_transfer.range_mover import Alter, RangeOrder

# Enough staged pieces in flight to hide what posting and waiting cost, and what copies them.
_NUM_BUFFERS = 6
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


class _Staged(NamedTuple):
    """A piece on its way through a buffer."""

    piece: Piece
    buffer: torch.Tensor
    message: torch.Tensor
    operation: Operation


# A piece, and its bytes where they lie as they travel: in the pool, or copied ahead; else None.
_Placed = tuple[Piece, torch.Tensor | None]
# Fills a message before it is sent, or empties it once it is here.
_Copy = Callable[[Piece, torch.Tensor], None]


class MessageRanges:
    """One link's way to a pool.

    Invariant: used by one operation at a time, on the link's thread.
    """

    def __init__(self, blocks: PoolBlocks, *, theirs: KVLayout) -> None:
        ours = blocks.layout
        self._blocks = blocks
        self._cutter = RangeCutter(ours, peer_block_size=theirs.block_size, max_bytes=PIECE_BYTES)
        self._bytes_per_token = ours.bytes_per_token
        self._can_use_slabs = ours.block_size == theirs.block_size
        unit = ours.bytes_per_block if self._can_use_slabs else ours.bytes_per_token
        self._buffer_bytes = max(PIECE_BYTES, unit)
        self._buffers: list[torch.Tensor] = []
        self._num_buffers = 0

    def prepare(self, order: RangeOrder) -> None:
        """Cut a range while its peer is still asked for it; on any thread."""
        order.plan = self._cut(order)

    def prepare_send(self, order: RangeOrder) -> None:
        """The same, and copy the parts of blocks that it begins and ends with; on any thread.

        Nothing is copied of unequal blocks, which would be all of it, nor of a device's pool.
        """
        placed = self._cut(order)
        if self._can_use_slabs and self._blocks.device.type == "cpu":
            for index, (piece, place) in enumerate(placed):
                if place is None and not piece.as_slabs:
                    placed[index] = piece, self._gather(order, piece)
        order.plan = placed

    def send_range(self, link: PostingLink, order: RangeOrder, *, alter: Alter | None) -> int:
        """Send a range; returns the bytes. `alter` may spoil each piece (fault injection).

        When it returns or raises, nothing reads the pool blocks any more.
        """

        def fill(piece: Piece, message: torch.Tensor) -> None:
            self._blocks.gather(*_where(order, piece), message, as_slabs=piece.as_slabs)
            self._synchronize()
            if alter:
                alter(message)

        is_direct = not alter and self._blocks.device.type == link.device.type
        return self._run(link, order, link.send, is_direct=is_direct, fill=fill)

    def receive_range(
        self, link: PostingLink, order: RangeOrder, *, alter: Alter | None, is_wanted: bool
    ) -> int:
        """Receive a range into the blocks, or let it pass by when it is not wanted any more.

        When it returns or raises, nothing writes the pool blocks or the buffers any more.
        """

        def empty(piece: Piece, message: torch.Tensor) -> None:
            if alter:
                alter(message)
            if is_wanted:
                self._blocks.scatter(*_where(order, piece), message, as_slabs=piece.as_slabs)
                self._synchronize()

        is_on_cpu = self._blocks.device.type == link.device.type == "cpu"  # see above
        is_direct = is_wanted and not alter and is_on_cpu
        return self._run(link, order, link.receive, is_direct=is_direct, empty=empty)

    def _run(
        self,
        link: PostingLink,
        order: RangeOrder,
        post: Callable[[torch.Tensor], Operation],
        *,
        is_direct: bool,
        fill: _Copy | None = None,
        empty: _Copy | None = None,
    ) -> int:
        deadline = time.monotonic() + order.timeout_s
        direct: list[Operation] = []
        staged: deque[_Staged] = deque()
        try:
            for piece, place in order.plan or self._cut(order):
                if is_direct and place is not None:
                    direct.append(post(place))
                    continue
                if not self._has_buffer():
                    self._complete(staged.popleft(), deadline, empty)
                buffer = self._take_buffer(link.device)
                message = buffer[: piece.num_bytes]
                if fill:
                    fill(piece, message)
                staged.append(_Staged(piece, buffer, message, post(message)))
            while staged:
                self._complete(staged.popleft(), deadline, empty)
            if direct:
                # they end in order: with the last one all have
                direct.pop().wait(_left_s(deadline))
        except BaseException as error:
            # the peer posts all pieces, so an operation ends whole or with its link
            link.abort(f"operation failed: {error}")
            _drain([*(each.operation for each in staged), *direct], deadline)
            raise
        return (order.token_end - order.token_start) * self._bytes_per_token

    def _cut(self, order: RangeOrder) -> list[_Placed]:
        placed: list[_Placed] = []
        for piece in self._cutter.cut(order.token_start, order.token_end):
            start, end, _, as_slabs = piece
            place = self._blocks.in_place(order.block_ids, start, end, as_slabs=as_slabs)
            placed.append((piece, place))
        return placed

    def _gather(self, order: RangeOrder, piece: Piece) -> torch.Tensor:
        message = torch.empty(piece.num_bytes, dtype=torch.uint8)
        self._blocks.gather(*_where(order, piece), message, as_slabs=piece.as_slabs)
        return message

    def _complete(self, staged: _Staged, deadline: float, empty: _Copy | None) -> None:
        staged.operation.wait(_left_s(deadline))
        if empty:
            empty(staged.piece, staged.message)
        self._buffers.append(staged.buffer)

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


def _left_s(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _drain(operations: Sequence[Operation], deadline: float) -> None:
    for operation in operations:
        try:
            operation.wait(_left_s(deadline))
        except Exception:  # noqa: BLE001 - the first failure is the one that is reported
            continue
