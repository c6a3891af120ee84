"""A block's name in the router: 60 bits of its hash, since millions of them must stay small.

Among ten million blocks two share a name in one router out of some 20,000; then one prompt's
cache hit is overestimated. Nothing but a routing decision rests on a name.
"""

from collections.abc import Collection
from typing import Any, NamedTuple, NewType

import numpy as np

from engine.block_hash import BlockHash

BlockName = NewType("BlockName", int)

_DIGEST_BYTES = 32
_NAME_BITS = 60  # Python keeps an int of two 30-bit digits in 32 bytes, its header included


class BlockScheme(NamedTuple):
    """How a worker cuts and names its blocks, as its Hello says."""

    block_size: int  # tokens
    hash_root: BlockHash  # start of its hash chains, for an empty salt


def block_names(hashes: Collection[bytes]) -> list[BlockName]:
    """Names of digests, in order; ValueError unless each has 32 bytes."""
    joined = b"".join(hashes)
    if any(len(each) != _DIGEST_BYTES for each in hashes):
        raise ValueError(f"Got block hashes of other lengths but expected {_DIGEST_BYTES} bytes")
    words: np.ndarray[Any, np.dtype[np.uint64]] = np.frombuffer(joined, dtype="<u8")
    names = words[:: _DIGEST_BYTES // 8] >> np.uint64(64 - _NAME_BITS)
    return [BlockName(name) for name in names.tolist()]
