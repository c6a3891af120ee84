"""The tokens of one attempt and the block hashes under which workers may hold them."""

from collections.abc import Sequence

from engine.block_hash import BlockHash, hash_blocks, salted_root
from router.worker_view import WorkerView


class Prompt:
    """Hashes on demand, once for each way the workers cut and name their blocks."""

    def __init__(
        self, token_ids: Sequence[int], *, cache_salt: str, num_output_tokens: int
    ) -> None:
        self.token_ids = token_ids
        self.num_output_tokens = num_output_tokens  # expected still to come
        self._cache_salt = cache_salt
        self._chains: dict[tuple[int, BlockHash], list[BlockHash]] = {}

    def __len__(self) -> int:
        return len(self.token_ids)

    def block_hashes(self, worker: WorkerView) -> list[BlockHash]:
        """The chain as this worker hashes it."""
        scheme = (worker.block_size, worker.hash_root)
        if scheme not in self._chains:
            self._chains[scheme] = hash_blocks(
                self.token_ids,
                block_size=worker.block_size,
                root=salted_root(worker.hash_root, self._cache_salt),
            )
        return self._chains[scheme]
