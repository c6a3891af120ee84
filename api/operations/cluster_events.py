"""What changed in the cluster, as a person would tell it: out of one status after another."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

MAX_EVENTS: Final = 100
_LEVELS = {"ready": "good"} | dict.fromkeys(
    ("lost", "broken", "incompatible", "unavailable"), "bad"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterEvent:
    """One change."""

    at: float  # seconds since the epoch
    level: str  # good, bad or info
    text: str


class ClusterEvents:
    """Owns the last changes. Invariant: each change of a state is told once."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._events: deque[ClusterEvent] = deque(maxlen=MAX_EVENTS)
        self._states: dict[str, str] = {}
        self._targets: dict[str, int] = {}  # of pools that grow and shrink

    def update(self, status: Mapping[str, Any]) -> None:
        """Compare with the status before."""
        states = dict(_states(status))
        for subject, state in states.items():
            if state != self._states.get(subject):
                self._tell(_LEVELS.get(state, "info"), f"{subject} is {state}")
        for subject in self._states.keys() - states.keys():
            self._tell("info", f"{subject} is gone")
        self._states = states
        for pool, scaling in status.get("scaling", {}).items():
            before = self._targets.get(pool, scaling["target"])
            if scaling["target"] != before:
                change = f"{pool}: {scaling['target']} workers instead of {before}"
                self._tell("info", f"{change}: {scaling['reason']}")
            self._targets[pool] = scaling["target"]

    def _tell(self, level: str, text: str) -> None:
        self._events.append(ClusterEvent(at=self._clock(), level=level, text=text))

    def newest_first(self) -> list[dict[str, Any]]:
        """Return them as plain data."""
        return [asdict(each) for each in reversed(self._events)]


def _states(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The cluster, its workers and their links; a restarted worker is the same subject."""
    yield "the cluster", status["state"]
    living = {each["id"] for each in status["workers"] if each["state"] != "lost"}
    for worker in status["workers"]:
        # A lost process is shown for a while beside the one that took its place.
        if worker["state"] != "lost" or worker["id"] not in living:
            yield worker["id"], worker["state"]
            if worker["pool"] == "decode":
                for link in worker["links"]:
                    yield f"link {link['peer']} to {worker['id']}", link["state"]
