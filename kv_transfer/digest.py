"""Digest of a token range's KV: over canonical bytes, so that block sizes do not matter."""

import hashlib
from collections.abc import Sequence

import torch

from kv_transfer.pool_blocks import block_parts

_DIGEST_BYTES = 16


def range_digest(
    pool: torch.Tensor, block_ids: Sequence[int], token_start: int, token_end: int
) -> bytes:
    """Hash tokens [token_start, token_end) as they lie in the pool's blocks; any thread."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for _, _, part in block_parts(pool, block_ids, token_start, token_end):
        # [tokens, num_layers, 2, num_kv_heads, head_dim]: token by token, however long a block is
        tokens = part.permute(2, 0, 1, 3, 4).contiguous().cpu()
        digest.update(tokens.view(torch.uint8).numpy().data)
    return digest.digest()
