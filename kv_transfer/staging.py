"""Pool blocks to messages and back, through memory the link owns where that is needed.

A range travels as pieces, several of them posted at once, so that one is copied while others are on
their way. Blocks that lie side by side are sent from where they lie: they are held until the send
has ended. On the other side only the receiver's own thread writes pool blocks, never the network:
an aborted receive can spoil a buffer, not the pool.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kv_transfer.backend import Operation
from kv_transfer.layout import KVLayout, Piece, block_range, split_range

# Enough pieces in flight to hide what posting and waiting cost.
_NUM_BUFFERS = 6
# All buffers together stay in the last-level cache. A block of this size or more is a piece of its
# own, so that it never has to be gathered.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeOrder:
    """One granted operation: tokens [token_start, token_end) of a request's blocks."""

    block_ids: Sequence[int]
    token_start: int
    token_end: int
    timeout_s: float


class RangeMover(Protocol):
    """Moves granted ranges between our pool and a link, on the link's thread."""

    def send_range(
        self, link: Any, order: RangeOrder, *, alter: Callable[[torch.Tensor], None] | None
    ) -> int:
        """Send a range; returns the bytes. `alter` may spoil each piece (fault injection)."""

    def receive_range(
        self,
        link: Any,
        order: RangeOrder,
        *,
        alter: Callable[[torch.Tensor], None] | None,
        write: Callable[[Callable[[], None]], None],
    ) -> int:
        """Receive a range; each piece's copy into the pool goes through `write`, which may skip."""


class Staging:
    """The buffers of one link. Invariant: used by one operation at a time, on the link's thread."""

    def __init__(self, pool: torch.Tensor, *, ours: KVLayout, theirs: KVLayout) -> None:
        self._pool = pool  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
        # the same memory as bytes: [num_blocks, bytes of a block]
        self._blocks = pool.view(torch.uint8).view(len(pool), -1)
        self._layout = ours
        self._peer_block_size = theirs.block_size
        can_use_slabs = ours.block_size == theirs.block_size
        unit = ours.bytes_per_block if can_use_slabs else ours.bytes_per_token
        self._buffer_bytes = max(PIECE_BYTES, unit)
        self._buffers: list[torch.Tensor] = []

    def send_range(
        self, link: PostingLink, order: RangeOrder, *, alter: Callable[[torch.Tensor], None] | None
    ) -> int:
        """Send a range; returns the bytes. `alter` may spoil each piece (fault injection).

        When it returns or raises, nothing reads the pool blocks any more.
        """

        def post(piece: Piece, buffer: torch.Tensor) -> Operation:
            run = None if alter else self._side_by_side(order, piece, link.device)
            if run is not None:
                # the blocks lie side by side: they travel as they lie
                return link.send(run)
            self._gather(order, piece, buffer)
            if alter:
                alter(buffer)
            return link.send(buffer)

        return self._run_pieces(link, order, post, lambda _piece, _buffer: None)

    def receive_range(
        self,
        link: PostingLink,
        order: RangeOrder,
        *,
        alter: Callable[[torch.Tensor], None] | None,
        write: Callable[[Callable[[], None]], None],
    ) -> int:
        """Receive a range; each piece's copy into the pool goes through `write`, which may skip it.

        When it returns or raises, nothing writes the pool blocks or the buffers any more.
        """

        def post(_piece: Piece, buffer: torch.Tensor) -> Operation:
            return link.receive(buffer)

        def finish(piece: Piece, buffer: torch.Tensor) -> None:
            if alter:
                alter(buffer)
            write(lambda: self._scatter(order, piece, buffer))

        return self._run_pieces(link, order, post, finish)

    def _run_pieces(
        self,
        link: PostingLink,
        order: RangeOrder,
        post: Callable[[Piece, torch.Tensor], Operation],
        finish: Callable[[Piece, torch.Tensor], None],
    ) -> int:
        deadline = time.monotonic() + order.timeout_s
        pieces = split_range(
            order.token_start,
            order.token_end,
            layout=self._layout,
            peer_block_size=self._peer_block_size,
            max_bytes=PIECE_BYTES,
        )
        posted: deque[tuple[Piece, torch.Tensor, Operation]] = deque()
        try:
            for number, piece in enumerate(pieces):
                if len(posted) == _NUM_BUFFERS:
                    self._complete_oldest(posted, deadline, finish)
                buffer = self._buffer(number, link.device)[: piece.num_bytes]
                posted.append((piece, buffer, post(piece, buffer)))
            while posted:
                self._complete_oldest(posted, deadline, finish)
        except BaseException as error:
            # the peer posts all pieces, so an operation ends whole or with its link
            link.abort(f"operation failed: {error}")
            _drain([operation for _, _, operation in posted], deadline)
            raise
        return (order.token_end - order.token_start) * self._layout.bytes_per_token

    @staticmethod
    def _complete_oldest(
        posted: deque[tuple[Piece, torch.Tensor, Operation]],
        deadline: float,
        finish: Callable[[Piece, torch.Tensor], None],
    ) -> None:
        piece, buffer, operation = posted[0]
        operation.wait(max(deadline - time.monotonic(), 0.001))
        posted.popleft()
        finish(piece, buffer)

    def _buffer(self, number: int, device: torch.device) -> torch.Tensor:
        while len(self._buffers) <= number % _NUM_BUFFERS:
            # pinned, so that copies between device and host need no extra staging of the driver's
            is_pinned = device.type == "cpu" and self._pool.device.type == "cuda"
            self._buffers.append(
                torch.empty(
                    self._buffer_bytes, dtype=torch.uint8, device=device, pin_memory=is_pinned
                )
            )
        return self._buffers[number % _NUM_BUFFERS]

    def _side_by_side(
        self, order: RangeOrder, piece: Piece, device: torch.device
    ) -> torch.Tensor | None:
        if not piece.as_slabs or self._pool.device.type != device.type:
            return None
        runs = list(self._runs(order, piece))
        return runs[0][1].view(-1) if len(runs) == 1 else None

    def _runs(self, order: RangeOrder, piece: Piece) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (index in the piece, bytes [n, block]) of each n blocks that lie side by side."""
        first, end = block_range(piece.token_start, piece.token_end, self._layout.block_size)
        ids = order.block_ids[first:end]
        start = 0
        for index in range(1, len(ids) + 1):
            if index == len(ids) or ids[index] != ids[index - 1] + 1:
                yield start, self._blocks[ids[start] : ids[index - 1] + 1]
                start = index

    def _gather(self, order: RangeOrder, piece: Piece, buffer: torch.Tensor) -> None:
        for staged, view in self._views(order, piece, buffer):
            staged.copy_(view)
        self._synchronize()

    def _scatter(self, order: RangeOrder, piece: Piece, buffer: torch.Tensor) -> None:
        for staged, view in self._views(order, piece, buffer):
            view.copy_(staged)
        self._synchronize()

    def _views(
        self, order: RangeOrder, piece: Piece, buffer: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each part of a message beside the part of the pool it stands for."""
        if not piece.as_slabs:
            yield from self._token_views(order, piece, buffer)
            return
        slabs = buffer.view(-1, self._blocks.shape[1])
        for index, blocks in self._runs(order, piece):
            yield slabs[index : index + len(blocks)], blocks

    def _token_views(
        self, order: RangeOrder, piece: Piece, buffer: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        # staged: [num_layers, 2, tokens, num_kv_heads, head_dim] in canonical order
        _, layers, two, _, heads, dim = self._pool.shape
        staged = buffer.view(self._pool.dtype).view(layers, two, -1, heads, dim)
        for start, end, part in block_parts(
            self._pool, order.block_ids, piece.token_start, piece.token_end
        ):
            yield staged[:, :, start - piece.token_start : end - piece.token_start], part

    def _synchronize(self) -> None:
        if self._pool.device.type == "cuda":
            torch.cuda.current_stream(self._pool.device).synchronize()


def block_parts(
    pool: torch.Tensor, block_ids: Sequence[int], token_start: int, token_end: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield (start, end, view) for each block that holds a part of [token_start, token_end).

    The view is [num_layers, 2, end - start, num_kv_heads, head_dim].

        tokens   32      40            64    70            96      [40, 70) with block_size 32:
        block     |-----------1---------|-----------2------|       (40, 64, block 1 from offset 8)
                          [-------------)[----)                    (64, 70, block 2 from offset 0)
    """
    block_size = pool.shape[3]
    first, end_block = block_range(token_start, token_end, block_size)
    for index in range(first, end_block):
        start = max(token_start, index * block_size)
        end = min(token_end, (index + 1) * block_size)
        offset = start - index * block_size
        yield start, end, pool[block_ids[index], :, :, offset : offset + end - start]


def _drain(operations: Sequence[Operation], deadline: float) -> None:
    for operation in operations:
        try:
            operation.wait(max(deadline - time.monotonic(), 0.001))
        except Exception:  # noqa: BLE001 - the first failure is the one that is reported
            continue
