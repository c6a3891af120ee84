"""Which worker of one pool probably holds which prefix.

Fed by the workers' own block events, and by predictions at routing time that expire. Each pool has
its own index: a block on a prefill worker saves computation, one on a decode worker saves bytes.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from engine.block_hash import BlockHash
from router.worker_view import WorkerKey

PREDICTION_TTL_S = 5.0


@dataclass(frozen=True, slots=True)
class BlockHit:
    """Leading blocks of a chain one worker holds."""

    num_blocks: int  # predicted ones included
    num_confirmed_blocks: int


class PrefixIndex:
    """Maps block hash -> worker -> when that knowledge ends.

    Invariants: a worker has at most its `limit` entries, and after `scrub` none; an entry the
    worker told of never expires, a predicted one always does.
    """

    def __init__(self) -> None:
        self._holders: dict[BlockHash, dict[WorkerKey, float]] = {}
        # The same entries by worker, oldest first.
        self._held: dict[WorkerKey, dict[BlockHash, None]] = {}
        self._limits: dict[WorkerKey, int] = {}
        self._predictions: deque[tuple[float, WorkerKey, BlockHash]] = deque()

    def add_worker(self, key: WorkerKey, *, limit: int) -> None:
        """Start from nothing for this worker; only known workers get entries."""
        self.scrub(key)
        self._held[key] = {}
        self._limits[key] = max(limit, 1)

    def scrub(self, key: WorkerKey) -> None:
        """Forget the worker and all it held."""
        for block_hash in list(self._held.pop(key, ())):
            self._drop_holder(key, block_hash)
        self._limits.pop(key, None)

    def store(self, key: WorkerKey, block_hashes: Iterable[BlockHash]) -> None:
        """The worker says it holds these."""
        for block_hash in block_hashes:
            self._put(key, block_hash, math.inf)

    def remove(self, key: WorkerKey, block_hashes: Iterable[BlockHash]) -> None:
        """The worker says it dropped these."""
        held = self._held.get(key, {})
        for block_hash in block_hashes:
            if block_hash in held:
                del held[block_hash]
                self._drop_holder(key, block_hash)

    def clear(self, key: WorkerKey) -> None:
        """The worker says it dropped everything."""
        self.remove(key, list(self._held.get(key, ())))

    def predict(self, key: WorkerKey, block_hashes: Sequence[BlockHash], *, now_s: float) -> None:
        """A request just sent there will leave these."""
        self._expire(now_s)
        expires_at = now_s + PREDICTION_TTL_S
        for block_hash in block_hashes[: self._limits.get(key, 0)]:
            known_until = self._holders.get(block_hash, {}).get(key, 0.0)
            if known_until < expires_at:
                self._put(key, block_hash, expires_at)
                self._predictions.append((expires_at, key, block_hash))

    def match(
        self, block_hashes: Sequence[BlockHash], keys: Collection[WorkerKey], *, now_s: float
    ) -> dict[WorkerKey, BlockHit]:
        """How many leading blocks each of `keys` holds; workers without any are left out."""
        hits: dict[WorkerKey, BlockHit] = {}
        alive = list(keys)
        first_predicted: dict[WorkerKey, int] = {}
        for depth, block_hash in enumerate(block_hashes):
            holders = self._holders.get(block_hash, {})
            still_alive = []
            for key in alive:
                until = holders.get(key, 0.0)
                if until <= now_s:
                    hits[key] = BlockHit(depth, first_predicted.get(key, depth))
                    continue
                still_alive.append(key)
                if until != math.inf:
                    first_predicted.setdefault(key, depth)
            alive = still_alive
            if not alive:
                break
        depth = len(block_hashes)
        for key in alive:
            hits[key] = BlockHit(depth, first_predicted.get(key, depth))
        return {key: hit for key, hit in hits.items() if hit.num_blocks > 0}

    def num_entries(self, key: WorkerKey | None = None) -> int:
        """Entries of one worker, or of all."""
        if key is not None:
            return len(self._held.get(key, ()))
        return sum(map(len, self._held.values()))

    def check_integrity(self) -> None:
        """Assert that both maps say the same and no bound is broken."""
        forward = {(k, h) for h, holders in self._holders.items() for k in holders}
        backward = {(k, h) for k, held in self._held.items() for h in held}
        assert forward == backward, forward ^ backward
        assert all(self._holders.values()), "an empty entry stayed"
        for key, held in self._held.items():
            assert len(held) <= self._limits[key], (key, len(held))

    def _put(self, key: WorkerKey, block_hash: BlockHash, until: float) -> None:
        held = self._held.get(key)
        if held is None:
            return
        if block_hash not in held and len(held) >= self._limits[key]:
            oldest = next(iter(held))
            del held[oldest]
            self._drop_holder(key, oldest)
        held[block_hash] = None
        self._holders.setdefault(block_hash, {})[key] = until

    def _drop_holder(self, key: WorkerKey, block_hash: BlockHash) -> None:
        holders = self._holders[block_hash]
        del holders[key]
        if not holders:
            del self._holders[block_hash]

    def _expire(self, now_s: float) -> None:
        while self._predictions and self._predictions[0][0] <= now_s:
            _, key, block_hash = self._predictions.popleft()
            # Confirmed or predicted anew since: a later entry stands.
            if self._holders.get(block_hash, {}).get(key, math.inf) <= now_s:
                self.remove(key, [block_hash])
