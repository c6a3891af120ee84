"""Block names of prompts that were hashed lately: most prompts begin as an earlier one did.

A prompt is looked up stride by stride, under a hash of all tokens so far; only from the first
unknown stride on its blocks are hashed one by one.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from engine.block_hash import TOKEN_BYTES, BlockHash, hash_packed, pack_tokens
from router.block_name import BlockName, BlockScheme, block_names

STRIDE_BLOCKS = 64
MAX_STRIDES = 4096  # about 15 MB


class HashedPrefixes:
    """Owns the strides hashed lately. Invariant: at most MAX_STRIDES, the last used ones."""

    def __init__(self) -> None:
        self._strides: OrderedDict[bytes, tuple[list[BlockName], BlockHash]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._strides)

    def names(
        self, token_ids: Sequence[int], scheme: BlockScheme, *, root: BlockHash
    ) -> list[BlockName]:
        """Names of the full blocks of a prompt; `root` is the scheme's, salted."""
        packed = pack_tokens(token_ids)
        size = STRIDE_BLOCKS * scheme.block_size * TOKEN_BYTES
        names: list[BlockName] = []
        parent = root
        for start in range(0, len(packed) - size + 1, size):
            stride_names, parent = self._stride(
                packed[start : start + size], scheme.block_size, parent
            )
            names += stride_names
        rest = packed[len(packed) // size * size :]
        names += block_names(hash_packed(rest, block_size=scheme.block_size, parent=parent))
        return names

    def _stride(
        self, packed: bytes, block_size: int, parent: BlockHash
    ) -> tuple[list[BlockName], BlockHash]:
        key = hashlib.sha256(parent + packed).digest()
        known = self._strides.get(key)
        if known is not None:
            self._strides.move_to_end(key)
            return known
        hashes = hash_packed(packed, block_size=block_size, parent=parent)
        self._strides[key] = stride = block_names(hashes), hashes[-1]
        if len(self._strides) > MAX_STRIDES:
            self._strides.popitem(last=False)
        return stride
