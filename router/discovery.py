"""Where the router learns which workers exist."""

from collections.abc import Sequence
from typing import Protocol

from rpc.description import WorkerDescription


class Discovery(Protocol):
    """Lists the workers that should be alive.

    Called every 10 s, more often after a change, never on a request's path. An error or a missing
    worker is tolerated: a worker whose state stream flows stays in use.
    """

    async def describe(self) -> Sequence[WorkerDescription]:
        """Describe each worker that answered."""
        ...


class StaticDiscovery:
    """A fixed list, for workers that are started by hand."""

    def __init__(self, workers: Sequence[WorkerDescription]) -> None:
        self.workers = list(workers)

    async def describe(self) -> Sequence[WorkerDescription]:
        """Describe them all."""
        return list(self.workers)
