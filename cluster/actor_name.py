"""Names a replica's actor, so that the Ray UI and Ray's logs show more than Serve's class.

Ray asks an actor for its `repr` once, when the actor is made, and asks the class that Serve made
of ours, which has none. Serve unpickles a replica's arguments in that very moment: the name rides
among them. The rank is not known then (Serve gives it later): Serve's own replica id stands in
its place, the one that the Serve page of the Ray UI lists.
"""

import logging
from collections.abc import Callable

_log = logging.getLogger(__name__)


class ActorName(str):
    """A name such as "prefill"; a process that unpickles it shows its replica by this name."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[[str], "ActorName"], tuple[str]]:
        return _arrive, (str(self),)


def _arrive(name: str) -> ActorName:
    """What the pickle calls: Serve pickles arguments more than once, so the name stays one."""
    _name_replica(name)
    return ActorName(name)


def _name_replica(name: str) -> None:
    """Let this process's replica call itself `relevo <name> <replica id>`."""
    try:
        # Not in Serve's public API: without it the actor only keeps the name Serve gave it.
        from ray.serve._private.replica import ReplicaActor  # noqa: PLC0415
    except ImportError:
        _log.warning("This Ray's replicas cannot be named; the Ray UI shows Serve's class")
        return

    def show(replica: ReplicaActor) -> str:
        implementation = getattr(replica, "_replica_impl", None)
        replica_id = getattr(implementation, "_replica_id", None)
        return f"relevo {name} {getattr(replica_id, 'unique_id', '')}".rstrip()

    ReplicaActor.__repr__ = show  # type: ignore[method-assign, assignment]
