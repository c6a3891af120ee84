"""Which worker of one pool probably holds which prefix.

Fed by the workers' own block events, and by predictions at routing time that expire. Each pool has
its own index: a block on a prefill worker saves computation, one on a decode worker saves bytes.

    block name ──► bitmap of slots          one dict entry per block, however many workers hold it
    slot      ◄──► worker                   a bit each, from 1 on (0: in no index); a lost worker's
                                            bit rests before its reuse
    worker    ──► its names, in an array    to take its bit away again (8 bytes a block)

Equal bitmaps are one object, so a block costs its name and its dict entry. Measured against other
structures in docs/adr/0008-prefix-index.md.
"""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, repeat

import numpy as np

from router.block_name import BlockName, BlockScheme
from router.cached_tokens import CachedTokens, Floats
from router.predictions import Predictions
from router.worker_view import NO_SLOT, WorkerKey

MAX_SHARED_BITMAPS = 1 << 16
# An array of names may be this much longer than what its worker holds before it is made anew.
SPARE_NAMES = 1024
TURNS_BEFORE_REUSE = 2
FEW_BITS = 24  # that are sooner found one by one than all at once, where neither was done lately


@dataclass(slots=True, kw_only=True)
class _Held:
    """What one worker holds. Invariant: `names` has each block it holds, and maybe ones it lost."""

    slot: int
    bit: int  # 1 << slot
    limit: int
    scheme: BlockScheme
    num_blocks: int = 0
    names: "array[int]" = field(default_factory=lambda: array("Q"))


class PrefixIndex:
    """Maps block names to the workers that hold them.

    Invariants: a worker has at most its `limit` blocks, and after `scrub` none; a block the worker
    told of stays until it tells otherwise, a predicted one expires.
    """

    def __init__(self) -> None:
        self._holders: dict[BlockName, int] = {}
        self._workers: dict[WorkerKey, _Held] = {}
        self._num_slots = 1
        self._resting: deque[tuple[int, int]] = deque()  # (turn of its loss, slot)
        self._bitmaps: dict[int, int] = {}
        self._predictions = Predictions()
        self.schemes: Counter[BlockScheme] = Counter()  # of the known workers

    # Workers.

    def add_worker(self, key: WorkerKey, *, limit: int, scheme: BlockScheme) -> None:
        """Start from nothing for this worker; only known workers get entries."""
        self.scrub(key)
        slot = self._take_slot()
        self._workers[key] = _Held(
            slot=slot, bit=self._share(1 << slot), limit=max(limit, 1), scheme=scheme
        )
        self.schemes[scheme] += 1

    def scrub(self, key: WorkerKey) -> None:
        """Forget the worker and all it held."""
        held = self._workers.pop(key, None)
        if held is None:
            return
        self._drop(held, held.names)
        # What was predicted of it still carries its bit.
        self._resting.append((self._predictions.num_turns, held.slot))
        self.schemes -= Counter([held.scheme])

    def _take_slot(self) -> int:
        is_rested = self._resting and (
            self._predictions.num_turns - self._resting[0][0] >= TURNS_BEFORE_REUSE
        )
        if is_rested:
            return self._resting.popleft()[1]
        self._num_slots += 1
        return self._num_slots - 1

    def slot(self, key: WorkerKey) -> int:
        """Where answers tell of this worker."""
        held = self._workers.get(key)
        return held.slot if held is not None else NO_SLOT

    # Events.

    def store(self, key: WorkerKey, names: Iterable[BlockName]) -> None:
        """The worker says it holds these."""
        held = self._workers.get(key)
        if held is None:
            return
        holders, bit, added = self._holders, held.bit, []
        for name in names:
            known = holders.get(name)
            if known is None:
                holders[name] = bit
            elif known & bit:
                continue
            else:
                holders[name] = self._share(known | bit)
            added.append(name)
        held.num_blocks += len(added)
        held.names.extend(array("Q", added))
        if held.num_blocks > held.limit:
            self._drop(held, added[held.limit - held.num_blocks :])
        self._tidy(held)

    def remove(self, key: WorkerKey, names: Sequence[BlockName]) -> None:
        """The worker says it dropped these."""
        held = self._workers.get(key)
        if held is None:
            return
        self._predictions.remove(held.bit, names)
        self._drop(held, names)
        self._tidy(held)

    def clear(self, key: WorkerKey) -> None:
        """The worker says it dropped everything."""
        if (held := self._workers.get(key)) is not None:
            self.add_worker(key, limit=held.limit, scheme=held.scheme)

    def predict(self, key: WorkerKey, names: Sequence[BlockName], *, now_s: float) -> None:
        """A request just sent there will leave these."""
        self._predictions.turn(now_s)
        if (held := self._workers.get(key)) is not None:
            self._predictions.add(held.bit, names[: held.limit])

    def _drop(self, held: _Held, names: Iterable[int]) -> None:
        holders, bit, num_dropped = self._holders, held.bit, 0
        for each in names:
            name = BlockName(each)
            known = holders.get(name, 0)
            if not known & bit:
                continue
            if known == bit:
                del holders[name]
            else:
                holders[name] = self._share(known ^ bit)
            num_dropped += 1
        held.num_blocks -= num_dropped

    def _tidy(self, held: _Held) -> None:
        if len(held.names) > 2 * held.num_blocks + SPARE_NAMES:
            get, bit = self._holders.get, held.bit
            held.names = array("Q", {name for name in held.names if get(BlockName(name), 0) & bit})

    def _share(self, bitmap: int) -> int:
        # Forgetting the table costs sharing with what is held already, nothing else.
        if len(self._bitmaps) >= MAX_SHARED_BITMAPS:
            self._bitmaps.clear()
        return self._bitmaps.setdefault(bitmap, bitmap)

    # Questions.

    def match(
        self, names_of: Callable[[BlockScheme], Sequence[BlockName]], *, now_s: float
    ) -> CachedTokens:
        """How many leading tokens of a prompt each worker holds; `names_of` cuts the prompt."""
        self._predictions.turn(now_s)
        cached = CachedTokens(np.zeros(self._num_slots), np.zeros(self._num_slots))
        for scheme in self.schemes:
            if names := names_of(scheme):
                self._match(names, scheme.block_size, cached)
        return cached

    def _match(self, names: Sequence[BlockName], block_size: int, cached: CachedTokens) -> None:
        """Walk along the prompt; who does not hold a block of it is out from there on."""
        told = self._holders.get(names[0], 0)
        alive = told | self._predictions.of_one(names[0])
        if not alive:
            return
        depth = self._num_told(names, alive)
        num_tokens, rest = depth * block_size, names[depth:]
        held = map(self._holders.get, rest, repeat(0))
        # Blocks of one prompt mostly have the same holders.
        for bitmaps, run in groupby(zip(held, *self._predictions.of(rest), strict=False)):
            holders, young, old = bitmaps
            told = _keep(told, holders, num_tokens, cached.num_confirmed)
            alive = _keep(alive, holders | young | old, num_tokens, cached.num_tokens)
            if not alive:
                return
            num_tokens += len(list(run)) * block_size
        _note(told, num_tokens, cached.num_confirmed)
        _note(alive, num_tokens, cached.num_tokens)

    def _num_told(self, names: Sequence[BlockName], bitmap: int) -> int:
        """Leading blocks that all of these slots told of: no prediction says more of them."""
        passed = None
        for depth, holders in enumerate(map(self._holders.get, names, repeat(0))):
            if holders is not passed:
                if bitmap & holders != bitmap:
                    return depth
                passed = holders
        return len(names)

    @property
    def num_blocks(self) -> int:
        """Distinct blocks the workers told of."""
        return len(self._holders)

    @property
    def num_slots(self) -> int:
        """Bits in use or resting."""
        return self._num_slots - 1

    @property
    def num_predictions(self) -> int:
        """Predicted blocks, not yet expired."""
        return len(self._predictions)

    def num_entries(self, key: WorkerKey | None = None) -> int:
        """Blocks one worker told of, or all of them together."""
        if key is not None:
            held = self._workers.get(key)
            return held.num_blocks if held is not None else 0
        return sum(held.num_blocks for held in self._workers.values())

    def check_integrity(self) -> None:
        """Assert that all maps say the same and no bound is broken."""
        known_bits = 0
        for key, held in self._workers.items():
            assert 0 < held.slot < self._num_slots, key
            assert not known_bits & held.bit, key
            told = {n for n, bitmap in self._holders.items() if bitmap & held.bit}
            assert len(told) == held.num_blocks <= held.limit, (key, len(told), held.num_blocks)
            assert told <= set(held.names), key
            assert len(held.names) <= 2 * held.num_blocks + SPARE_NAMES, key
            known_bits |= held.bit
        for bitmap in self._holders.values():
            assert bitmap, "an empty entry stayed"
            assert not bitmap & ~known_bits, "an entry of an unknown worker stayed"
        assert sum(self.schemes.values()) == len(self._workers)


def _keep(alive: int, holders: int, num_tokens: int, counts: Floats) -> int:
    """Who goes on; the others end with this many tokens."""
    still = alive & holders
    if still != alive:
        _note(alive ^ still, num_tokens, counts)
    return still


def _note(bitmap: int, num_tokens: int, counts: Floats) -> None:
    """Write a number down for these slots."""
    if bitmap.bit_count() <= FEW_BITS:
        while bitmap:
            slot = bitmap.bit_length() - 1
            counts[slot] = num_tokens
            bitmap ^= 1 << slot
        return
    digits = np.frombuffer(bitmap.to_bytes((len(counts) + 7) // 8, "little"), dtype=np.uint8)
    counts[np.unpackbits(digits, count=len(counts), bitorder="little").view(bool)] = num_tokens
