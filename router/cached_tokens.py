"""How much of one prompt the workers of a pool hold, by their slots in the pool's index."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.worker_view import WorkerView

Floats = npt.NDArray[np.float64]
Slots = npt.NDArray[np.intp]
NOTHING = np.zeros(1)


class CachedTokens(NamedTuple):
    """Leading tokens of the prompt, [slots]; 0 at the slot of those that are in no index."""

    num_tokens: Floats = NOTHING  # predicted ones included
    num_confirmed: Floats = NOTHING  # as the workers told

    def expected(self, slots: Slots) -> Floats:
        """Of these workers, predicted ones included."""
        return _spread(self.num_tokens, slots)

    def confirmed(self, slots: Slots) -> Floats:
        """Of these workers, as they told."""
        return _spread(self.num_confirmed, slots)

    def num_tokens_of(self, worker: WorkerView) -> int:
        """Of one of them, predicted ones included."""
        return _one(self.num_tokens, worker.slot)

    def num_confirmed_of(self, worker: WorkerView) -> int:
        """Of one of them, as it told."""
        return _one(self.num_confirmed, worker.slot)


def _spread(counts: Floats, slots: Slots) -> Floats:
    if counts is NOTHING:
        return np.zeros(len(slots))
    return counts.take(slots)


def _one(counts: Floats, slot: int) -> int:
    return 0 if counts is NOTHING else int(counts[slot])
