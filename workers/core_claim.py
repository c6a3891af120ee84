"""Cores of a node, each claimed by one worker for one of the threads that it computes with.

A claim is a name that the kernel keeps for as long as the process has it open: nothing is left of
a worker that was killed, and workers that know nothing of each other never share a core.
"""

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")


class CoreClaim:
    """Invariant: it has as many cores as it was asked for, or none."""

    def __init__(self, num_cores: int, *, namespace: str = "relevo.core") -> None:
        """Claim nothing yet. Only claims of one namespace exclude each other."""
        self.cores: tuple[int, ...] = ()
        self._num_cores = num_cores
        self._namespace = namespace
        self._names: list[socket.socket] = []

    def try_claim(self, allowed: Iterable[int] | None = None) -> bool:
        """Whether it has its cores now; of `allowed`, by default what this process may run on."""
        if self.cores:
            return True
        candidates = os.sched_getaffinity(0) if allowed is None else allowed
        claimed: list[int] = []
        for core in whole_cores_first(candidates):
            if len(claimed) < self._num_cores and self._try_name(core):
                claimed.append(core)
        if len(claimed) < self._num_cores:
            self.release()
            return False
        self.cores = tuple(claimed)
        return True

    def release(self) -> None:
        """Let others have them."""
        self.cores = ()
        for name in self._names:
            name.close()
        self._names.clear()

    def _try_name(self, core: int) -> bool:
        # An abstract name, which no file system knows.
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0{self._namespace}.{core}")
        except OSError:
            name.close()
            return False
        self._names.append(name)
        return True


def whole_cores_first(cores: Iterable[int]) -> list[int]:
    """The first hardware thread of each core, then the second ones."""
    seen: dict[str, int] = {}
    places = []
    for core in sorted(cores):
        siblings = str(core)
        with suppress(OSError):
            siblings = (_TOPOLOGY / f"cpu{core}/topology/thread_siblings_list").read_text()
        seen[siblings] = seen.get(siblings, 0) + 1
        places.append((seen[siblings], core))
    return [core for _, core in sorted(places)]
