from hypothesis import given, settings
from hypothesis import strategies as st

from router.block_name import BlockName
from sim.block_cache import BlockCache, Lease


def names(*numbers: int) -> list[BlockName]:
    return [BlockName(number) for number in numbers]


def use(cache: BlockCache, *numbers: int) -> None:
    """One request with these blocks, from its start to its end."""
    lease = cache.take(names(*numbers), len(numbers))
    assert lease is not None
    cache.store(lease, names(*numbers))
    cache.free(lease)


def test_what_was_computed_is_found_until_others_need_the_room() -> None:
    cache = BlockCache(4)
    use(cache, 1, 2, 3)
    assert cache.num_leading(names(1, 2, 9)) == 2
    use(cache, 5, 6)
    # The end of the oldest prompt went first.
    assert cache.num_leading(names(1, 2, 3)) == 2
    assert cache.drain_events() == (names(1, 2, 5, 6), [])


def test_a_shared_prefix_is_owned_once() -> None:
    cache = BlockCache(4)
    use(cache, 1, 2)
    first, second = cache.take(names(1, 2), 3), cache.take(names(1, 2), 3)
    assert first is not None
    assert second is not None
    assert cache.num_used == 4
    assert cache.take(names(7), 1) is None
    cache.free(first)
    assert cache.num_used == 3


def test_who_is_refused_changes_nothing() -> None:
    cache = BlockCache(3)
    use(cache, 1, 2)
    assert cache.take(names(1, 2), 4) is None
    assert (cache.num_used, cache.num_cached, cache.num_free) == (0, 2, 1)
    assert cache.num_leading(names(1, 2)) == 2


def test_events_tell_every_change_once() -> None:
    cache = BlockCache(2)
    use(cache, 1, 2)
    assert cache.drain_events() == (names(1, 2), [])
    use(cache, 3)
    assert cache.drain_events() == (names(3), names(2))
    assert cache.drain_events() == ([], [])
    # Removed and stored again before it was told: nothing has changed for who listens.
    use(cache, 2)
    use(cache, 3)
    stored, removed = cache.drain_events()
    assert set(stored) - set(removed) == {2}


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 6)), max_size=60),
    st.integers(1, 12),
)
def test_books_agree_after_any_history(history: list[tuple[bool, int, int]], size: int) -> None:
    cache = BlockCache(size)
    leases: list[Lease] = []
    told: set[int] = set()
    for is_new, start, length in history:
        if is_new:
            wanted = names(*(start * 3 + n for n in range(length)))
            lease = cache.take(wanted, length + 1)
            if lease is not None:
                cache.store(lease, wanted)
                leases.append(lease)
        elif leases:
            cache.free(leases.pop(start % len(leases)))
        cache.check_integrity()
        stored, removed = cache.drain_events()
        assert not told & set(stored)
        assert set(removed) <= told
        told = told - set(removed) | set(stored)
        assert told == set(cache.all_names())
    for lease in leases:
        cache.free(lease)
    assert cache.num_used == 0
