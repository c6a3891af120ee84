"""The shape of a KV pool, what two pools must share, and the arithmetic of token ranges.

A pool is one tensor [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]. Token t of a
request lies in `block_ids[t // block_size]` at offset `t % block_size`. All ranges are half-open:

    tokens      0        32        64        96    110
                |---------|---------|---------|-----|      block_size 32, 110 tokens
    blocks      [    0    |    1    |    2    |  3  )      [40, 110) lies in blocks [1, 4)
                         40 ^                      ^ 110

Pools with equal block sizes exchange whole blocks as slabs, contiguous [n, layers, 2, block, heads,
dim]. Blocks of which less than half is meant, and all blocks of pools with unequal block sizes,
travel in messages of the canonical, token-granular layout [layers, 2, tokens, kv_heads, head_dim].
"""

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple

# of the pool and of what travels; raised with every change of either
LAYOUT_VERSION = 4

_BYTES_PER_ELEMENT = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Shape and identity of a KV pool, without its number of blocks."""

    layout_version: int = LAYOUT_VERSION
    model_id: str
    model_revision: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    hash_scheme: str

    def __post_init__(self) -> None:
        """Refuse a layout that describes no memory."""
        if self.dtype not in _BYTES_PER_ELEMENT:
            raise ValueError(f"Got {self.dtype = } but expected one of {list(_BYTES_PER_ELEMENT)}")
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"Got {name} = {getattr(self, name)} but expected at least 1")

    @property
    def rows_per_block(self) -> int:
        """K and V of each layer; in a block a row's tokens lie side by side."""
        return self.num_layers * 2

    @property
    def bytes_per_row_token(self) -> int:
        """Bytes of one token in a row."""
        return self.num_kv_heads * self.head_dim * _BYTES_PER_ELEMENT[self.dtype]

    @property
    def bytes_per_row(self) -> int:
        """Bytes of a row of one block."""
        return self.block_size * self.bytes_per_row_token

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token over all layers."""
        return self.rows_per_block * self.bytes_per_row_token

    @property
    def bytes_per_block(self) -> int:
        """KV bytes of one block over all layers."""
        return self.bytes_per_token * self.block_size

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold tokens [0, num_tokens)."""
        return -(-num_tokens // self.block_size)

    def blocks_of(self, token_start: int, token_end: int) -> int:
        """Blocks that hold a part of [token_start, token_end)."""
        first, end = block_range(token_start, token_end, self.block_size)
        return end - first


def incompatibility(ours: KVLayout, theirs: KVLayout) -> str | None:
    """Say why two pools can never exchange KV, or None. Block sizes may differ."""
    differences = [
        f"{field.name}: {getattr(ours, field.name)!r} here, {getattr(theirs, field.name)!r} there"
        for field in fields(KVLayout)
        if field.name != "block_size" and getattr(ours, field.name) != getattr(theirs, field.name)
    ]
    return "; ".join(differences) or None


def block_range(token_start: int, token_end: int, block_size: int) -> tuple[int, int]:
    """Return the half-open range of blocks that hold tokens [token_start, token_end)."""
    assert 0 <= token_start < token_end, f"empty token range [{token_start}, {token_end})"
    return token_start // block_size, -(-token_end // block_size)


def whole_blocks(token_start: int, token_end: int, block_size: int) -> tuple[int, int]:
    """Return the half-open range of blocks that move whole between pools of this block size.

    A last block is one of them when at least half of it is meant: its other half costs less than
    the copies of many small rows. The range is empty, or less, when no block moves whole.
    """
    return -(-token_start // block_size), (2 * token_end + block_size) // (2 * block_size)


class Piece(NamedTuple):
    """One message of an operation: tokens [token_start, token_end), `num_bytes` on the wire.

    A slab of the last block goes on to the block's end, whatever of it is meant.
    """

    token_start: int
    token_end: int
    num_bytes: int
    # whole blocks as they lie, or token by token in canonical layout
    as_slabs: bool


class RangeCutter:
    """Cuts ranges into messages of at most `max_bytes` each (at least one block or token).

    Both sides cut alike: the result depends on what the two layouts share and on both block sizes,
    whichever is whose. Equal blocks that are whole travel as slabs (`whole_blocks`). What then is
    left travels by tokens, and first: what has to be copied is copied while the slabs travel.

        block_size 32   |    block 1    |    block 2    |    block 3    |
        [40, 110)           [40 -- 64)  [64 --------- 96)[96 - 110)
                             tokens      slab             tokens
        [40, 115)           [40 -- 64)  [64 --------- 96)[96 -------- 128)
                             tokens      slab             slab
    """

    def __init__(self, layout: KVLayout, *, peer_block_size: int, max_bytes: int) -> None:
        self._size = size = layout.block_size
        self._can_use_slabs = size == peer_block_size
        self._bytes_per_token = layout.bytes_per_token
        # on the coarser grid, so that both sides copy whole blocks where they can; a block too
        # large for one message is cut only by tokens
        max_tokens = max(1, max_bytes // self._bytes_per_token)
        grid = max(size, peer_block_size)
        self._tokens_per_piece = max_tokens // grid * grid or max_tokens
        self._tokens_per_slab = max_tokens // size * size or size

    def cut(self, token_start: int, token_end: int) -> list[Piece]:
        """The messages of a range, in the order in which they travel."""
        size = self._size
        first, end = whole_blocks(token_start, token_end, size)
        if not self._can_use_slabs or first >= end:
            return self._cut(token_start, token_end, self._tokens_per_piece, as_slabs=False)
        slabs_start, slabs_end = first * size, end * size
        slabs = self._cut(slabs_start, slabs_end, self._tokens_per_slab, as_slabs=True)
        if token_start == slabs_start and slabs_end >= token_end:
            return slabs
        pieces = []
        for start, stop in ((token_start, slabs_start), (slabs_end, token_end)):
            if start < stop:
                pieces += self._cut(start, stop, self._tokens_per_piece, as_slabs=False)
        return pieces + slabs

    def _cut(self, start: int, token_end: int, step: int, *, as_slabs: bool) -> list[Piece]:
        # pieces end on multiples of the step
        cuts = [start, *range((start // step + 1) * step, token_end, step), token_end]
        per_token = self._bytes_per_token
        return [Piece(at, end, (end - at) * per_token, as_slabs) for at, end in pairwise(cuts)]
