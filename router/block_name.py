"""A block's name in the router: 60 bits of its hash, since millions of them must stay small.

Among ten million blocks two share a name in one router out of some 20,000; then one prompt's
cache hit is overestimated. Nothing but a routing decision rests on a name.
"""

from collections.abc import Collection
from typing import NamedTuple, NewType, cast

import numpy as np

from engine.block_hash import BlockHash

BlockName = NewType("BlockName", int)

_DIGEST_BYTES = 32
_SPARE_BITS = 64 - 60  # Python keeps an int of two 30-bit digits in 32 bytes with its header


class BlockScheme(NamedTuple):
    """How a worker cuts and names its blocks, as its Hello says."""

    block_size: int  # tokens
    hash_root: BlockHash  # start of its hash chains, for an empty salt


def block_names(hashes: Collection[bytes]) -> list[BlockName]:
    """Names of digests, in order; ValueError unless each has 32 bytes."""
    if not {_DIGEST_BYTES}.issuperset(map(len, hashes)):
        raise ValueError(f"Got block hashes of other lengths but expected {_DIGEST_BYTES} bytes")
    return names_of_joined(b"".join(hashes))


def names_of_joined(hashes: bytes) -> list[BlockName]:
    """Names of digests that stand one behind the other."""
    words = np.frombuffer(hashes, dtype="<u8")[:: _DIGEST_BYTES // 8]
    return cast(list[BlockName], (words >> _SPARE_BITS).tolist())
