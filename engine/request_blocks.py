"""Gives requests their blocks: what the prefix cache has of them first, then new ones."""

from dataclasses import dataclass

from engine.block_hash import BlockHash, hash_block, hash_blocks, salted_root
from engine.block_pool import BlockPool
from engine.request import Request


@dataclass(frozen=True, slots=True)
class BlockDemand:
    """What a request without blocks needs."""

    num_tokens: int  # to have room for
    max_cached_tokens: int  # to take from the prefix cache


class RequestBlocks:
    """Knows how a request's tokens lie in blocks of the pool.

    `block_ids` of a request, as half-open ranges of tokens:

        [0, num_stored_blocks * block_size)   in the prefix map, or equal to one that is
        [.., num_computed_tokens)             computed, last block not full
        [.., len(block_ids) * block_size)     room for what comes
    """

    def __init__(self, pool: BlockPool, *, block_size: int, hash_root: BlockHash) -> None:
        self._pool = pool
        self._block_size = block_size
        self._hash_root = hash_root

    def num_needed(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self._block_size)

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens of a waiting request that admission would find cached now."""
        if request.wants_prompt_logprobs:
            return 0
        hashes = self._full_hashes(request, request.num_tokens - 1)
        return len(self._pool.find_prefix(hashes)) * self._block_size

    def num_taken(self, request: Request, demand: BlockDemand) -> int:
        """Blocks that `allocate` would take out of what the pool can give."""
        cached = self._pool.find_prefix(self._full_hashes(request, demand.max_cached_tokens))
        num_new = self.num_needed(demand.num_tokens) - len(cached)
        return num_new + sum(self._pool.is_unowned(block_id) for block_id in cached)

    def allocate(self, request: Request, demand: BlockDemand) -> list[int]:
        """Give a request what it demands; the new blocks. The caller asks `num_taken` first."""
        cached = self._pool.find_prefix(self._full_hashes(request, demand.max_cached_tokens))
        self._pool.acquire(cached)
        new_block_ids = self._pool.allocate(self.num_needed(demand.num_tokens) - len(cached))
        request.block_ids = cached + new_block_ids
        request.num_computed_tokens = len(cached) * self._block_size
        request.num_stored_blocks = len(cached)
        if not request.num_preemptions:
            request.num_cached_tokens = request.num_computed_tokens
        return new_block_ids

    def store_computed(self, request: Request) -> None:
        """Enter the blocks that have become full and computed into the prefix map."""
        num_full = request.num_computed_tokens // self._block_size
        if request.num_stored_blocks >= num_full:
            return
        hashes = self._full_hashes(request, request.num_computed_tokens)
        for number in range(request.num_stored_blocks, num_full):
            self._pool.store(request.block_ids[number], hashes[number])
        request.num_stored_blocks = num_full

    def _full_hashes(self, request: Request, max_tokens: int) -> list[BlockHash]:
        """Hashes of the full blocks of the first `max_tokens` tokens."""
        size = self._block_size
        hashes = request.block_hashes
        if not hashes:
            root = salted_root(self._hash_root, request.cache_salt)
            hashes += hash_blocks(request.token_ids, block_size=size, root=root)
        while (len(hashes) + 1) * size <= request.num_tokens:
            start = len(hashes) * size
            hashes.append(hash_block(hashes[-1], request.token_ids[start : start + size]))
        return hashes[: max_tokens // size]
