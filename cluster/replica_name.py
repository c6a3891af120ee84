"""What a replica calls itself, such as decode-0: the least number that no living replica has.

The number is claimed among the keys of Ray's control store while the replica's actor is made.
Serve's own rank comes later than Ray asks an actor for its name, and is handed out anew among the
replicas that stay when a pool shrinks; a claimed number is its replica's as long as it lives.
"""

from collections.abc import Mapping, Set
from functools import cache
from typing import Protocol

import ray
from ray.experimental import internal_kv

_NAMESPACE = b"relevo"


class Store(Protocol):
    """Keys that are written once, seen by all nodes."""

    def claims(self, prefix: str) -> Mapping[str, str]:
        """Every key with this prefix, and who wrote it."""
        ...

    def put_new(self, key: str, owner: str) -> bool:
        """Write a key; False, and nothing done, when it is there."""
        ...

    def living(self) -> Set[str]:
        """The names of all actors that are alive or being made."""
        ...


def claim_number(store: Store, group: str, owner: str) -> int:
    """The least number in a group of replicas that is nobody's or a dead one's, now the owner's.

    A key is `<group>/<number>/<how often it was claimed before>`: of those who find the same
    owner dead, one alone can write the next.
    """
    while True:
        holders = _last_holders(store.claims(f"{group}/"))
        # Only now: who claimed was alive before, so who is missing here has died.
        living = store.living()
        number, times = 0, 0
        while number in holders:
            holder, times = holders[number]
            if holder == owner:
                return number
            if holder not in living:
                break
            number, times = number + 1, 0
        if store.put_new(f"{group}/{number}/{times}", owner):
            return number


def _last_holders(claims: Mapping[str, str]) -> dict[int, tuple[str, int]]:
    """Of each number who claimed it last, and how often it was claimed."""
    holders: dict[int, tuple[str, int]] = {}
    for key, owner in claims.items():
        number, times = (int(part) for part in key.split("/")[-2:])
        if times >= holders.get(number, ("", 0))[1]:
            holders[number] = owner, times + 1
    return holders


class RayStore:
    """The key-value store of Ray's control service, and its list of named actors."""

    def __init__(self) -> None:
        self._client = internal_kv.internal_kv_get_gcs_client()  # type: ignore[no-untyped-call]

    def claims(self, prefix: str) -> Mapping[str, str]:
        """As many as replicas were ever started, in two calls."""
        keys = self._client.internal_kv_keys(prefix.encode(), _NAMESPACE)
        found = self._client.internal_kv_multi_get(keys, _NAMESPACE)
        return {key.decode(): owner.decode() for key, owner in found.items()}

    def put_new(self, key: str, owner: str) -> bool:
        """One step of the store: of two that write, one is told that nothing was added."""
        added = self._client.internal_kv_put(key.encode(), owner.encode(), False, _NAMESPACE)
        return bool(added)

    def living(self) -> Set[str]:
        """Serve names the actor of every replica, in a namespace of its own."""
        return {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}


@cache  # asked for the actor's name first, then by what it owns
def replica_name(kind: str) -> str:
    """Such as prefill-0; `kind` is prefill, decode or ingress. Only in a replica's process."""
    actor = ray.get_runtime_context().get_actor_name()
    assert actor is not None
    group, _, _ = actor.rpartition("#")  # Serve's: SERVE_REPLICA::<app>#<deployment>#<replica id>
    return f"{kind}-{claim_number(RayStore(), group, actor)}"
