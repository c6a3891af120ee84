"""A fault plan read from the environment, and the points where the system asks it what to do.

`RELEVO_FAULT_PLAN` holds a JSON list of faults. It is refused unless `RELEVO_TESTING=1`.
Counters live as files in `RELEVO_FAULT_DIR`, shared by all processes, so a worker that was
restarted does not die of the same fault again. Each `*.json` in that folder is a further list of
faults, in force as long as the file is there: so a test strikes a system that already runs.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POINTS = frozenset(
    {
        "admission",
        "prefill_step",
        "decode_step",
        "sample",
        "kv_send",
        "kv_recv",
        "detokenize",
        "control_message",
        "engine_heartbeat",
    }
)
ACTIONS = frozenset({"raise", "kill", "freeze", "delay", "drop", "duplicate", "corrupt"})
MATCH_KEYS = frozenset({"pool", "worker", "request_label"})
SETTLED_NS = 50_000_000


class FaultInjectedError(RuntimeError):
    """Raised at a fault point whose action is `raise`."""


# What a point knows about itself; a set where it stands for several requests at once.
Fact = str | frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One entry of the plan."""

    point: str
    action: str
    match: Mapping[str, str]
    after: int = 0  # hits skipped first
    count: int = 1  # times it acts; 0 = always
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a plan that could never act."""
        if self.point not in POINTS:
            raise ValueError(f"Got {self.point = } but expected one of {sorted(POINTS)}")
        if self.action not in ACTIONS:
            raise ValueError(f"Got {self.action = } but expected one of {sorted(ACTIONS)}")
        if unknown := set(self.match) - MATCH_KEYS:
            raise ValueError(f"Got match keys {sorted(unknown)} but expected {sorted(MATCH_KEYS)}")


class FaultPlan:
    """The faults of this process.

    Invariant: each fault acts at most `count` times over all processes that share the folder.
    """

    def __init__(self, faults: list[Fault], folder: Path | None) -> None:
        self._faults = _named("fault", faults)
        self._folder = PlanFolder(folder) if folder is not None else None
        self._hits: dict[str, int] = {}
        self.identity: dict[str, str] = {}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "FaultPlan":
        """Read the plan; ValueError when it is malformed or not allowed here."""
        text, folder = environ.get("RELEVO_FAULT_PLAN", ""), environ.get("RELEVO_FAULT_DIR", "")
        if environ.get("RELEVO_TESTING") != "1":
            if text:
                raise ValueError("RELEVO_FAULT_PLAN is set but RELEVO_TESTING=1 is not")
            return cls([], None)
        return cls(_parse(text or "[]"), Path(folder) if folder else None)

    def due(self, point: str, context: Mapping[str, Fact]) -> Fault | None:
        """Count a hit of `point` and return the fault that acts now, if any."""
        facts: dict[str, Fact] = {**self.identity, **context}
        for name, fault in self._all():
            if fault.point != point:
                continue
            if not all(_is_match(facts.get(key, ""), value) for key, value in fault.match.items()):
                continue
            hits = self._count_hit(name)
            if hits > fault.after and (fault.count == 0 or hits <= fault.after + fault.count):
                return fault
        return None

    def _all(self) -> Iterator[tuple[str, Fault]]:
        yield from self._faults.items()
        if self._folder is not None:
            yield from self._folder.faults().items()

    def _count_hit(self, name: str) -> int:
        if self._folder is not None:
            return self._folder.count_hit(name)
        self._hits[name] = self._hits.get(name, 0) + 1
        return self._hits[name]

    def __bool__(self) -> bool:
        return bool(self._faults) or self._folder is not None


class PlanFolder:
    """What the processes of one test share: counters, and faults that come and go."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed_at_ns = -1  # of the folder when its files were last read
        self._faults: dict[str, Fault] = {}

    def faults(self) -> Mapping[str, Fault]:
        """By name, of the files that are there now. A file must be renamed into the folder."""
        try:
            changed_at_ns = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return {}
        if changed_at_ns != self._changed_at_ns:
            # The clock of a file system is coarse: another change may bear the same time.
            is_settled = time.time_ns() - changed_at_ns > SETTLED_NS
            # Never changed in place: other threads may be reading it.
            self._faults = self._read()
            self._changed_at_ns = changed_at_ns if is_settled else -1
        return self._faults

    def _read(self) -> dict[str, Fault]:
        faults: dict[str, Fault] = {}
        for file in sorted(self._path.glob("*.json")):
            with contextlib.suppress(FileNotFoundError):  # taken away this very moment
                faults |= _named(file.stem, _parse(file.read_text()))
        return faults

    def count_hit(self, name: str) -> int:
        """One more hit of this fault, over all processes; how many there are now."""
        descriptor = os.open(self._path / f"{name}.hits", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            hits = int(os.read(descriptor, 32) or b"0") + 1
            os.pwrite(descriptor, str(hits).encode(), 0)  # outlives a kill of this process
        finally:
            os.close(descriptor)
        return hits


def _parse(text: str) -> list[Fault]:
    return [Fault(**{"match": {}, **entry}) for entry in json.loads(text)]


def _named(prefix: str, faults: Sequence[Fault]) -> dict[str, Fault]:
    return {f"{prefix}-{number}": fault for number, fault in enumerate(faults)}


def _is_match(fact: Fact, wanted: str) -> bool:
    return wanted in fact if isinstance(fact, frozenset) else wanted == fact


_PLAN = FaultPlan.from_environment(os.environ)


def identify(*, pool: str, worker: str) -> None:
    """Say once who this process is, so that plans can match on it."""
    _PLAN.identity.update(pool=pool, worker=worker)


def is_armed() -> bool:
    """Whether any point of this process might act: a plan is there, or a folder for one."""
    return bool(_PLAN)


def fault_point(point: str, **context: Fact) -> str | None:
    """Ask the plan and carry out what blocks or ends.

    Returns `drop`, `duplicate` or `corrupt` where the caller has to carry it out, else None.
    """
    if not _PLAN:
        return None
    fault = _PLAN.due(point, context)
    if fault is None:
        return None
    if fault.action == "delay" or (fault.action == "freeze" and point == "engine_heartbeat"):
        time.sleep(fault.delay_s)
        return None
    return _carry_out(fault)


async def fault_point_async(point: str, **context: Fact) -> str | None:
    """Like `fault_point`, without blocking the event loop on a delay."""
    if not _PLAN:
        return None
    fault = _PLAN.due(point, context)
    if fault is None:
        return None
    if fault.action == "delay":
        await asyncio.sleep(fault.delay_s)
        return None
    return _carry_out(fault)


def _carry_out(fault: Fault) -> str | None:
    if fault.action == "raise":
        raise FaultInjectedError(f"fault at {fault.point}")
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.action == "freeze":
        # To this very thread: else it might go on until another one has stopped the process.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return None
    return fault.action
