"""Which processes of this node are replicas of the same deployment, and may share its ports."""

import os
from collections.abc import Set

import ray

from cluster.replica_name import RayStore, Store


def enter_siblings(store: Store, group: str, pid: int, owner: str) -> Set[int]:
    """Every process that ever entered this group, this one now among them.

    The dead are not taken out: nobody finds them listening.
    """
    store.put_new(f"{group}/{pid}", owner)
    return {int(key.rpartition("/")[2]) for key in store.claims(f"{group}/")}


def find_siblings() -> Set[int]:
    """The processes of this node's replicas of our own deployment. Only in a replica's process."""
    context = ray.get_runtime_context()
    actor = context.get_actor_name()
    assert actor is not None
    deployment, _, _ = actor.rpartition("#")  # as in `replica_name`
    group = f"{deployment}@{context.get_node_id()}"
    return enter_siblings(RayStore(), group, os.getpid(), actor)
