"""What workers will probably cache soon: blocks of requests that were just sent there.

Two generations; each TTL the older one is forgotten whole. So a prediction lives for one to two
TTLs and no entry has a clock of its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from operator import or_

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
        young = self._young
        for name in names[: MAX_GENERATION_BLOCKS - len(young)]:
            young[name] = young.get(name, 0) | bit

    def remove(self, bit: int, names: Sequence[BlockName]) -> None:
        """It will not."""
        for generation in (self._young, self._old):
            if generation:
                for name in names:
                    if generation.get(name, 0) & bit:
                        generation[name] &= ~bit

    def concern(self, names: Sequence[BlockName]) -> bool:
        """Whether any of these was predicted of anyone."""
        young, old = self._young, self._old
        if not (young or old):
            return False
        return not (young.keys().isdisjoint(names) and old.keys().isdisjoint(names))

    def add_to(self, holders: Iterable[int], names: Sequence[BlockName]) -> Iterator[int]:
        """Bitmaps of these names, with the slots that will hold each; looked up when taken."""
        young = map(self._young.get, names, repeat(0))
        old = map(self._old.get, names, repeat(0))
        return map(or_, holders, map(or_, young, old))
