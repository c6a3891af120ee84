"""What workers will probably cache soon: blocks of requests that were just sent there.

Two generations; each TTL the older one is forgotten whole. So a prediction lives for one to two
TTLs and no entry has a clock of its own.
"""

from collections.abc import Iterator, Sequence
from itertools import repeat

from router.block_name import BlockName

PREDICTION_TTL_S = 2.5
MAX_GENERATION_BLOCKS = 1 << 20


class Predictions:
    """Block name -> bitmap of slots. Invariant: a generation has a bounded number of entries."""

    def __init__(self) -> None:
        self._young: dict[BlockName, int] = {}
        self._old: dict[BlockName, int] = {}
        self._turned_at_s = 0.0
        self.num_turns = 0  # after two, nothing of before is left

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def turn(self, now_s: float) -> None:
        """Forget what is too old."""
        age_s = now_s - self._turned_at_s
        if age_s < PREDICTION_TTL_S:
            return
        self._old = self._young if age_s < 2 * PREDICTION_TTL_S else {}
        self._young = {}
        self._turned_at_s = now_s
        self.num_turns += 1

    def add(self, bit: int, names: Sequence[BlockName]) -> None:
        """This slot will hold these."""
        young, last, added = self._young, None, bit
        names = names[: MAX_GENERATION_BLOCKS - len(young)]
        if young.keys().isdisjoint(names):
            young.update(dict.fromkeys(names, bit))
            return
        for name in names:
            known = young.get(name, 0)
            # Neighbours mostly have the same bitmap: they share it, and are seen to.
            if known is not last:
                last, added = known, known | bit
            young[name] = added

    def remove(self, bit: int, names: Sequence[BlockName]) -> None:
        """It will not."""
        for generation in (self._young, self._old):
            if generation:
                for name in names:
                    if generation.get(name, 0) & bit:
                        generation[name] &= ~bit

    def of_one(self, name: BlockName) -> int:
        """Bitmap of the slots that will hold it."""
        return self._young.get(name, 0) | self._old.get(name, 0)

    def of(self, names: Sequence[BlockName]) -> tuple[Iterator[int], Iterator[int]]:
        """Bitmaps of the slots that will hold each, of both generations; looked up when taken.

        They may go on behind the last name.
        """
        return _look_up(self._young, names), _look_up(self._old, names)


def _look_up(generation: dict[BlockName, int], names: Sequence[BlockName]) -> Iterator[int]:
    return map(generation.get, names, repeat(0)) if generation else repeat(0)
