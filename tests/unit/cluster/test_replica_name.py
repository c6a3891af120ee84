"""Numbers of replicas: the least that is free, never one that a living replica has."""

import random
from collections.abc import Mapping, Sequence, Set

from hypothesis import given
from hypothesis import strategies as st

from cluster.replica_name import claim_number

GROUP = "SERVE_REPLICA::relevo#DecodeWorker"


class FakeStore:
    """Calls of others come between two of ours."""

    def __init__(self, alive: set[str], others: Sequence[str] = ()) -> None:
        self.keys: dict[str, str] = {}
        self.alive = alive
        self._others = iter(others)

    def claims(self, prefix: str) -> Mapping[str, str]:
        return {key: owner for key, owner in self.keys.items() if key.startswith(prefix)}

    def put_new(self, key: str, owner: str) -> bool:
        for other in self._others:
            self.alive.add(other)
            claim_number(self, GROUP, other)
        return self.keys.setdefault(key, owner) == owner

    def living(self) -> Set[str]:
        return set(self.alive)


def test_replicas_are_counted_from_zero() -> None:
    store = FakeStore({"a", "b", "c"})
    assert [claim_number(store, GROUP, owner) for owner in "abc"] == [0, 1, 2]
    assert claim_number(store, f"{GROUP}s", "a") == 0  # another pool's


def test_a_replica_asks_twice_and_is_told_the_same() -> None:
    store = FakeStore({"a", "b"})
    assert [claim_number(store, GROUP, owner) for owner in "abba"] == [0, 1, 1, 0]


def test_a_successor_takes_the_number_of_the_dead_again_and_again() -> None:
    store = FakeStore({"a", "b"})
    assert [claim_number(store, GROUP, owner) for owner in "ab"] == [0, 1]
    for life in range(12):  # past nine: numbers, not words, are compared
        store.alive = {f"a{life}", "b"}
        assert claim_number(store, GROUP, f"a{life}") == 0


def test_two_who_find_the_same_one_dead_do_not_both_follow_it() -> None:
    store = FakeStore({"dead"})
    assert claim_number(store, GROUP, "dead") == 0
    store = FakeStore({"late"}, others=("quick",))
    store.keys[f"{GROUP}/0/0"] = "dead"
    assert claim_number(store, GROUP, "late") == 1
    assert claim_number(store, GROUP, "quick") == 0


@given(st.lists(st.booleans(), max_size=60), st.randoms())
def test_no_two_living_replicas_have_one_number(births: list[bool], draw: random.Random) -> None:
    store = FakeStore(set())
    numbers: dict[str, int] = {}
    for index, is_birth in enumerate(births):
        if is_birth or not store.alive:
            store.alive.add(f"r{index}")
            numbers[f"r{index}"] = claim_number(store, GROUP, f"r{index}")
        else:
            store.alive.remove(draw.choice(sorted(store.alive)))
        taken = [numbers[owner] for owner in store.alive]
        assert len(set(taken)) == len(taken)
        assert max(taken, default=0) <= sum(births) + 1
