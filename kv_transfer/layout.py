"""The shape of a KV pool, what two pools must share, and the arithmetic of token ranges.

A pool is one tensor [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]. Token t of a
request lies in `block_ids[t // block_size]` at offset `t % block_size`. All ranges are half-open:

    tokens      0        32        64        96    110
                |---------|---------|---------|-----|      block_size 32, 110 tokens
    blocks      [    0    |    1    |    2    |  3  )      [40, 110) lies in blocks [1, 4)
                         40 ^                      ^ 110

Pools with equal block sizes exchange whole slabs, one block each, contiguous [n, layers, 2, block,
heads, dim]; the bytes of a block outside the range travel too and mean nothing. Unequal block
sizes meet in the canonical, token-granular layout [tokens, layers, 2, kv_heads, head_dim].
"""

import itertools
from dataclasses import dataclass, fields

LAYOUT_VERSION = 1

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
    def bytes_per_token(self) -> int:
        """KV bytes of one token over all layers."""
        element = _BYTES_PER_ELEMENT[self.dtype]
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * element

    @property
    def bytes_per_block(self) -> int:
        """KV bytes of one block over all layers."""
        return self.bytes_per_token * self.block_size

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold tokens [0, num_tokens)."""
        return -(-num_tokens // self.block_size)


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


@dataclass(frozen=True, slots=True)
class Piece:
    """One message of an operation: tokens [token_start, token_end), `num_bytes` on the wire."""

    token_start: int
    token_end: int
    num_bytes: int


def split_range(
    token_start: int, token_end: int, *, layout: KVLayout, as_slabs: bool, max_bytes: int
) -> list[Piece]:
    """Cut a range into messages of at most `max_bytes` each (at least one block or token).

    Both sides cut alike: the result depends on what the two layouts share and, for slabs, the
    equal block size.

        slabs, 2 blocks a piece    |  block 1  |  block 2  |  block 3  |
        [40, 110)                      [40 ---------- 96)[96 ---- 110)
    """
    if as_slabs:
        step = max(1, max_bytes // layout.bytes_per_block) * layout.block_size
        # cut at block borders, so that no block travels in two pieces
        first_cut = (token_start // layout.block_size) * layout.block_size + step
    else:
        step = max(1, max_bytes // layout.bytes_per_token)
        first_cut = token_start + step
    cuts = [token_start, *range(first_cut, token_end, step), token_end]
    pieces = []
    for start, end in itertools.pairwise(cuts):
        if as_slabs:
            first_block, end_block = block_range(start, end, layout.block_size)
            num_bytes = (end_block - first_block) * layout.bytes_per_block
        else:
            num_bytes = (end - start) * layout.bytes_per_token
        pieces.append(Piece(start, end, num_bytes))
    return pieces
