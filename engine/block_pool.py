"""Who owns which KV block.

A block moves between five states; the first that fits counts:

    quarantined   a link may still read or write it, nobody may reuse it
    used          ref_count > 0: running requests and reservations
    held          hold_count > 0: computed, kept for a peer until released
    cached        nobody's, but findable by hash; evicted least recently used first
    free          nobody's and nameless
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import StrEnum

from engine.block_hash import BlockHash
from engine.load import BlockCounts, BlockEvents


class BlockState(StrEnum):
    """State of one block."""

    FREE = "free"
    CACHED = "cached"
    USED = "used"
    HELD = "held"
    QUARANTINED = "quarantined"


class Block:
    """Counts of one block's owners, and its name when its tokens are known and computed."""

    __slots__ = ("block_hash", "hold_count", "quarantine_count", "ref_count", "state")

    def __init__(self) -> None:
        self.ref_count = 0
        self.hold_count = 0
        self.quarantine_count = 0
        self.block_hash: BlockHash | None = None
        self.state = BlockState.FREE

    def derive_state(self) -> BlockState:
        """The state that the counts ask for."""
        if self.quarantine_count:
            return BlockState.QUARANTINED
        if self.ref_count:
            return BlockState.USED
        if self.hold_count:
            return BlockState.HELD
        return BlockState.FREE if self.block_hash is None else BlockState.CACHED


class BlockPool:
    """Owns every KV block of this rank. Invariant: the five counts add up to num_blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._blocks = [Block() for _ in range(num_blocks)]
        # Both in the order of leaving their owner: the oldest is taken first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_by_state = dict.fromkeys(BlockState, 0)
        self._num_by_state[BlockState.FREE] = num_blocks
        self._block_id_by_hash: dict[BlockHash, int] = {}
        self._removed: dict[BlockHash, None] = {}
        self._stored: dict[BlockHash, None] = {}
        self._was_cleared = False

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could give out now."""
        return len(self._free) + len(self._cached)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take nameless blocks, evicting cached ones when no free one is left."""
        assert num_blocks <= self.num_available, "the caller asks num_available first"
        return [self._take_one() for _ in range(num_blocks)]

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block; a cached block becomes used."""
        for block_id in block_ids:
            self._blocks[block_id].ref_count += 1
            self._settle(block_id)

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block of a chain, last block first out."""
        # Reversed: the end of a chain is worth nothing without its start.
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is freed more often than taken"
            block.ref_count -= 1
            self._settle(block_id)

    def hold(self, block_ids: Sequence[int]) -> None:
        """Turn one reference of each block into a hold."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is held without a reference"
            block.ref_count -= 1
            block.hold_count += 1
            self._settle(block_id)

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one hold of each block of a chain."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.hold_count > 0, f"block {block_id} is released more often than held"
            block.hold_count -= 1
            self._settle(block_id)

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """Keep blocks from reuse, whoever gives them up, until `end_quarantine`."""
        for block_id in block_ids:
            self._blocks[block_id].quarantine_count += 1
            self._settle(block_id)

    def end_quarantine(self, block_ids: Sequence[int]) -> None:
        """Undo one `quarantine`."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.quarantine_count > 0, f"block {block_id} is not quarantined"
            block.quarantine_count -= 1
            self._settle(block_id)

    def find_prefix(self, block_hashes: Iterable[BlockHash]) -> list[int]:
        """Blocks of the longest leading part of the chain that is in the map."""
        block_ids: list[int] = []
        for block_hash in block_hashes:
            block_id = self._block_id_by_hash.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def is_unowned(self, block_id: int) -> bool:
        """Whether acquiring the block takes it out of `num_available`."""
        return self._blocks[block_id].state is BlockState.CACHED

    def store(self, block_id: int, block_hash: BlockHash) -> None:
        """Enter a fully computed block into the map, unless an equal one is there."""
        block = self._blocks[block_id]
        if block.block_hash is not None or block_hash in self._block_id_by_hash:
            return
        block.block_hash = block_hash
        self._block_id_by_hash[block_hash] = block_id
        self._stored[block_hash] = None
        self._settle(block_id)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Take blocks out of the map, whoever owns them: their content is not to be reused."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.block_hash is not None:
                self._remove_from_map(block)
                self._settle(block_id)

    def clear(self) -> None:
        """Empty the prefix map."""
        for block_id in self._block_id_by_hash.values():
            self._blocks[block_id].block_hash = None
            self._settle(block_id)
        self._block_id_by_hash.clear()
        self._removed.clear()
        self._stored.clear()
        self._was_cleared = True

    def counts(self) -> BlockCounts:
        """Blocks by state."""
        counts = self._num_by_state
        return BlockCounts(
            free=counts[BlockState.FREE],
            cached=counts[BlockState.CACHED],
            used=counts[BlockState.USED],
            held=counts[BlockState.HELD],
            quarantined=counts[BlockState.QUARANTINED],
            total=self.num_blocks,
        )

    def num_owned(self) -> int:
        """Blocks that requests use or hold, quarantined or not; looks at every block."""
        return sum(bool(block.ref_count or block.hold_count) for block in self._blocks)

    def drain_events(self) -> BlockEvents:
        """Changes of the map since the last call."""
        events = BlockEvents(
            removed=tuple(self._removed), stored=tuple(self._stored), cleared=self._was_cleared
        )
        self._removed.clear()
        self._stored.clear()
        self._was_cleared = False
        return events

    def cached_hashes(self) -> list[BlockHash]:
        """All hashes in the map, whether their blocks are owned or not."""
        return list(self._block_id_by_hash)

    def check_integrity(self) -> None:
        """Compare the books with each other; AssertionError when they differ."""
        num_by_state = dict.fromkeys(BlockState, 0)
        for block_id, block in enumerate(self._blocks):
            assert min(block.ref_count, block.hold_count, block.quarantine_count) >= 0
            assert block.state is block.derive_state(), f"block {block_id} is in the wrong state"
            assert (block.state is BlockState.FREE) == (block_id in self._free)
            assert (block.state is BlockState.CACHED) == (block_id in self._cached)
            if block.block_hash is not None:
                assert self._block_id_by_hash[block.block_hash] == block_id
            num_by_state[block.state] += 1
        assert num_by_state == self._num_by_state, "counts differ from the blocks"
        assert sum(num_by_state.values()) == self.num_blocks
        named = sum(block.block_hash is not None for block in self._blocks)
        assert named == len(self._block_id_by_hash), "the map names a block that has no name"

    def _take_one(self) -> int:
        block_id = next(iter(self._free or self._cached))
        block = self._blocks[block_id]
        if block.block_hash is not None:
            self._remove_from_map(block)
        block.ref_count = 1
        self._settle(block_id)
        return block_id

    def _remove_from_map(self, block: Block) -> None:
        assert block.block_hash is not None
        del self._block_id_by_hash[block.block_hash]
        # A hash stored since the last drain was never told; there is nothing to take back.
        if self._stored.pop(block.block_hash, self) is self:
            self._removed[block.block_hash] = None
        block.block_hash = None

    def _settle(self, block_id: int) -> None:
        """Bring lists and counts in line with the block's counts."""
        block = self._blocks[block_id]
        before, after = block.state, block.derive_state()
        if before is after:
            return
        if before is BlockState.FREE:
            del self._free[block_id]
        elif before is BlockState.CACHED:
            del self._cached[block_id]
        if after is BlockState.FREE:
            self._free[block_id] = None
        elif after is BlockState.CACHED:
            self._cached[block_id] = None
        self._num_by_state[before] -= 1
        self._num_by_state[after] += 1
        block.state = after
