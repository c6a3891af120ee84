"""Names a replica's actor, so that the Ray UI and Ray's logs show more than Serve's class.

Ray asks an actor for its `repr` once, when the actor is made, and asks the class that Serve made
of ours, which has none. Serve unpickles a replica's arguments in that very moment: the name rides
among them.
"""

import logging
from collections.abc import Callable

from cluster.replica_name import replica_name

_log = logging.getLogger(__name__)


class ActorName(str):
    """A kind such as "prefill"; a process that unpickles it shows its replica as prefill-0."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[[str], "ActorName"], tuple[str]]:
        return _arrive, (str(self),)


def _arrive(kind: str) -> ActorName:
    """What the pickle calls: Serve pickles arguments more than once, so the name stays one."""
    _name_replica(kind)
    return ActorName(kind)


def _name_replica(kind: str) -> None:
    """Let this process's replica call itself what its worker or ingress calls itself."""
    try:
        # Not in Serve's public API: without it the actor only keeps the name Serve gave it.
        from ray.serve._private.replica import ReplicaActor  # noqa: PLC0415
    except ImportError:
        _log.warning("This Ray's replicas cannot be named; the Ray UI shows Serve's class")
        return

    def show(_: ReplicaActor) -> str:
        return replica_name(kind)

    ReplicaActor.__repr__ = show  # type: ignore[method-assign, assignment]
