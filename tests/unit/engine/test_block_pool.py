"""BlockPool under every order of verbs."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.block_hash import BlockHash
from engine.block_pool import BlockPool

NUM_BLOCKS = 6


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


class PoolMachine(RuleBasedStateMachine):
    """Owners take and give; a model of the map and of the events follows along."""

    @initialize()
    def start(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS)
        self.used: list[list[int]] = []
        self.held: list[list[int]] = []
        self.quarantined: list[list[int]] = []
        self.told: set[BlockHash] = set()  # what a listener to the events knows

    @rule(count=st.integers(1, 3))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_available:
            block_ids = self.pool.allocate(count)
            owned = {b for group in self.used + self.held + self.quarantined for b in group}
            assert not owned & set(block_ids), "an owned block was given out"
            self.used.append(block_ids)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.pool.free(self.used.pop(data.draw(st.integers(0, len(self.used) - 1))))

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        group = self.used.pop(data.draw(st.integers(0, len(self.used) - 1)))
        self.pool.hold(group)
        self.held.append(group)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.used))
        self.pool.quarantine(group)
        self.quarantined.append(group)

    @precondition(lambda self: self.quarantined)
    @rule()
    def end_quarantine(self) -> None:
        self.pool.end_quarantine(self.quarantined.pop())

    @precondition(lambda self: self.used)
    @rule(data=st.data(), number=st.integers(0, 9))
    def store(self, data: st.DataObject, number: int) -> None:
        self.pool.store(data.draw(st.sampled_from(self.used))[0], name(number))

    @rule(numbers=st.lists(st.integers(0, 9), max_size=3))
    def share_prefix(self, numbers: list[int]) -> None:
        block_ids = self.pool.find_prefix(name(number) for number in numbers)
        if block_ids and len(set(block_ids)) == len(block_ids):
            self.pool.acquire(block_ids)
            self.used.append(block_ids)

    @precondition(lambda self: self.used)
    @rule()
    def forget(self) -> None:
        self.pool.forget(self.used[0])

    @rule()
    def clear(self) -> None:
        self.pool.clear()

    @rule()
    def listen(self) -> None:
        events = self.pool.drain_events()
        if events.cleared:
            self.told.clear()
        self.told -= set(events.removed)
        self.told |= set(events.stored)
        assert self.told == set(self.pool.cached_hashes())

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        counts = self.pool.counts()
        quarantined = {b for group in self.quarantined for b in group}
        used = {b for group in self.used for b in group} - quarantined
        held = {b for group in self.held for b in group} - quarantined - used
        assert (counts.quarantined, counts.used, counts.held) == (
            len(quarantined),
            len(used),
            len(held),
        )
        assert counts.total == NUM_BLOCKS
        assert counts.free + counts.cached == self.pool.num_available

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for group in self.used:
            self.pool.free(group)
        for group in self.held:
            self.pool.release(group)
        for group in self.quarantined:
            self.pool.end_quarantine(group)
        assert self.pool.num_available == NUM_BLOCKS


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_least_recently_used_block_is_evicted_first():
    pool = BlockPool(3)
    block_ids = pool.allocate(3)
    for number, block_id in enumerate(block_ids):
        pool.store(block_id, name(number))
    for block_id in block_ids:
        pool.free([block_id])
    pool.acquire([block_ids[0]])
    pool.free([block_ids[0]])  # the newest now
    assert pool.allocate(2) == block_ids[1:]
    assert pool.find_prefix([name(0)]) == block_ids[:1]


def test_the_end_of_a_chain_is_evicted_before_its_start():
    pool = BlockPool(2)
    chain = pool.allocate(2)
    for number, block_id in enumerate(chain):
        pool.store(block_id, name(number))
    pool.free(chain)
    pool.allocate(1)
    assert pool.find_prefix([name(0), name(1)]) == chain[:1]


def test_freeing_twice_is_a_bug_that_shows():
    pool = BlockPool(2)
    block_ids = pool.allocate(1)
    pool.free(block_ids)
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free(block_ids)


def test_a_block_stored_and_evicted_between_two_looks_is_no_event():
    pool = BlockPool(1)
    block_ids = pool.allocate(1)
    pool.store(block_ids[0], name(1))
    pool.free(block_ids)
    pool.allocate(1)
    assert not pool.drain_events()
