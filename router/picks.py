"""Own picks a worker's last report cannot know yet: they keep a burst from landing on one."""

from dataclasses import dataclass

from router.worker_view import NOTHING_PENDING, Pending

REPORT_LAG_S = 0.1  # a load that arrives this long after a pick knows of it


@dataclass(slots=True)
class _Pick:
    pending: Pending
    picked_at_s: float
    is_acknowledged: bool = False


class Picks:
    """The unreported picks of one worker. Invariant: none outlives its request."""

    def __init__(self) -> None:
        self._picks: dict[int, _Pick] = {}

    def add(self, pick_id: int, pending: Pending, *, now_s: float) -> None:
        """Count a request that is on its way."""
        self._picks[pick_id] = _Pick(pending, now_s)

    def acknowledge(self, pick_id: int) -> None:
        """The worker has it: its next report includes it."""
        if pick := self._picks.get(pick_id):
            pick.is_acknowledged = True

    def drop(self, pick_id: int) -> bool:
        """The request is over, or never arrived; True if it was still counted."""
        return self._picks.pop(pick_id, None) is not None

    def report_arrived(self, *, now_s: float) -> None:
        """Forget what the worker's new report includes."""
        for pick_id, pick in list(self._picks.items()):
            if pick.is_acknowledged or now_s - pick.picked_at_s >= REPORT_LAG_S:
                del self._picks[pick_id]

    def total(self) -> Pending:
        """All of them together."""
        if not self._picks:
            return NOTHING_PENDING
        columns = zip(*(pick.pending for pick in self._picks.values()), strict=True)
        return Pending(*map(sum, columns))

    def __len__(self) -> int:
        return len(self._picks)
