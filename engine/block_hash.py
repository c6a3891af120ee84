"""The chained hash that names a full block of tokens: equal in every process, free of seeds."""

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import NewType

from engine.native.hash_chain import DIGEST_BYTES, load_hash_chain, load_token_packer

BlockHash = NewType("BlockHash", bytes)

HASH_SCHEME = "sha256-v1"
TOKEN_BYTES = 4


def hash_root(  # noqa: PLR0913 - each is a fact that sets two caches apart
    *,
    model_id: str,
    model_revision: str,
    dtype: str,
    block_size: int,
    layout_version: int,
    rope_variant: str = "",
    lora: str = "",
) -> BlockHash:
    """Start of every chain: all that makes two KV blocks of equal tokens differ."""
    facts = (
        HASH_SCHEME,
        model_id,
        model_revision,
        dtype,
        str(block_size),
        str(layout_version),
        rope_variant,
        lora,
    )
    digest = hashlib.sha256()
    for fact in facts:
        _update_with_text(digest, fact)
    return BlockHash(digest.digest())


def salted_root(root: BlockHash, cache_salt: str) -> BlockHash:
    """Root of the chains of one salt; prompts under different salts never share a block."""
    if not cache_salt:
        return root
    digest = hashlib.sha256(root)
    _update_with_text(digest, cache_salt)
    return BlockHash(digest.digest())


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Hash of one full block that follows `parent`."""
    return BlockHash(
        hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()
    )


def hash_blocks(token_ids: Sequence[int], *, block_size: int, root: BlockHash) -> list[BlockHash]:
    """Hashes of the full blocks of `token_ids`, first block first; a partial one has none."""
    joined = joined_hashes(pack_tokens(token_ids), block_size=block_size, parent=root)
    return list(struct.unpack(f"{DIGEST_BYTES}s" * (len(joined) // DIGEST_BYTES), joined))


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Bytes of these tokens as they are hashed."""
    pack = load_token_packer()
    if pack is not None and type(token_ids) is list:
        return pack(token_ids)
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def joined_hashes(packed: bytes, *, block_size: int, parent: BlockHash) -> bytes:
    """Hashes of the full blocks of packed tokens that follow `parent`, one behind the other."""
    size = block_size * TOKEN_BYTES
    hash_chain = load_hash_chain()
    if hash_chain is not None and len(parent) == DIGEST_BYTES:
        return hash_chain(parent, packed, size)
    # Cut in one go, and nothing called but the hash: a block costs little more than its digest.
    blocks = struct.unpack_from(f"{size}s" * (len(packed) // size), packed)
    sha256, last = hashlib.sha256, bytes(parent)
    return b"".join([last := sha256(last + block).digest() for block in blocks])


def _update_with_text(digest: "hashlib._Hash", text: str) -> None:
    # Length first, so that no two lists of texts read as the same bytes.
    encoded = text.encode()
    digest.update(struct.pack("<Q", len(encoded)))
    digest.update(encoded)
