"""Gives requests their blocks: what the prefix cache has of them first, then new ones."""

from collections.abc import Sequence
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

    A request of several choices has one computed prompt; when it forks they share its full blocks:

        [0, num_full * block_size)            one block, one reference for each choice
        [num_full * block_size, ..)           a block for each: one keeps it, the others get a copy
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
        num_spare = self._num_spare(request, demand.num_tokens)
        num_new = self.num_needed(demand.num_tokens) + num_spare - len(cached)
        return num_new + sum(self._pool.is_unowned(block_id) for block_id in cached)

    def allocate(self, request: Request, demand: BlockDemand) -> list[int]:
        """Give a request what it demands; the new blocks. The caller asks `num_taken` first."""
        cached = self._pool.find_prefix(self._full_hashes(request, demand.max_cached_tokens))
        self._pool.acquire(cached)
        num_own = self.num_needed(demand.num_tokens) - len(cached)
        num_spare = self._num_spare(request, demand.num_tokens)
        new_block_ids = self._pool.allocate(num_own + num_spare)
        request.block_ids = cached + new_block_ids[:num_own]
        request.spare_block_ids = new_block_ids[num_own:]
        request.num_computed_tokens = len(cached) * self._block_size
        request.num_stored_blocks = len(cached)
        if not request.num_preemptions:
            request.num_cached_tokens = request.num_computed_tokens
        return new_block_ids

    def fork(self, request: Request, branches: Sequence[Request]) -> list[tuple[int, int]]:
        """Give the blocks of a computed prompt to its choices; which to copy, from and to."""
        num_full = request.num_computed_tokens // self._block_size
        shared, own = request.block_ids[:num_full], request.block_ids[num_full:]
        spare = request.spare_block_ids
        copies: list[tuple[int, int]] = []
        for branch in branches:
            if branch is branches[0]:
                branch.block_ids = request.block_ids
                continue
            self._pool.acquire(shared)
            taken, spare = spare[: len(own)], spare[len(own) :]
            branch.block_ids = shared + taken
            if request.num_computed_tokens % self._block_size:
                copies += zip(own, taken, strict=True)
        self._pool.free(spare)
        if not branches:
            self._pool.free(request.block_ids)
        request.block_ids, request.spare_block_ids = [], []
        return copies

    def free(self, request: Request) -> None:
        """Take all blocks from a request."""
        self._pool.free(request.spare_block_ids)
        self._pool.free(request.block_ids)
        request.block_ids, request.spare_block_ids = [], []

    def store_computed(self, request: Request) -> None:
        """Enter the blocks that have become full and computed into the prefix map."""
        num_full = request.num_computed_tokens // self._block_size
        if request.num_stored_blocks >= num_full:
            return
        hashes = self._full_hashes(request, request.num_computed_tokens)
        for number in range(request.num_stored_blocks, num_full):
            self._pool.store(request.block_ids[number], hashes[number])
        request.num_stored_blocks = num_full

    def store_arrived(self, request: Request) -> None:
        """The same for a request that has not run here yet; its blocks give way to equal ones.

        Requests with a common prefix whose KV arrived at the same time share it from here on.
        """
        self.store_computed(request)
        hashes = self._full_hashes(request, request.num_computed_tokens)
        shared = self._pool.find_prefix(hashes)
        self._pool.acquire(shared)
        self._pool.free(request.block_ids[: len(shared)])
        request.block_ids[: len(shared)] = shared

    def _num_spare(self, request: Request, num_tokens: int) -> int:
        """Blocks its other choices need beside those they will share."""
        num_shared = request.num_tokens // self._block_size
        return (request.num_seqs - 1) * (self.num_needed(num_tokens) - num_shared)

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
