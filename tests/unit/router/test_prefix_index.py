import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.block_hash import BlockHash
from router.block_name import BlockName, BlockScheme
from router.cached_tokens import CachedTokens
from router.predictions import PREDICTION_TTL_S
from router.prefix_index import PrefixIndex
from router.worker_view import WorkerKey

WORKERS = [WorkerKey("prefill-0", 1), WorkerKey("prefill-1", 1), WorkerKey("prefill-1", 2)]
CHAIN = [BlockName(1000 + number) for number in range(12)]
SCHEME = BlockScheme(4, BlockHash(b"root"))
LIMIT = 6
LONGEST_PREDICTION_S = 2 * PREDICTION_TTL_S


def index_of(*keys: WorkerKey, limit: int = 100) -> PrefixIndex:
    index = PrefixIndex()
    for key in keys:
        index.add_worker(key, limit=limit, scheme=SCHEME)
    return index


class Held(NamedTuple):
    """An answer of the index by worker; those without anything are left out."""

    num_tokens: dict[WorkerKey, int]
    num_confirmed: dict[WorkerKey, int]


def by_worker(index: PrefixIndex, cached: CachedTokens) -> Held:
    slots = np.array([index.slot(key) for key in WORKERS])
    answers = cached.expected(slots).tolist(), cached.confirmed(slots).tolist()
    return Held(*({k: n for k, n in zip(WORKERS, each, strict=True) if n} for each in answers))


def match(index: PrefixIndex, names: Sequence[BlockName] = CHAIN, now_s: float = 0.0) -> Held:
    return by_worker(index, index.match(lambda _: names, now_s=now_s))


def test_only_leading_blocks_count() -> None:
    index = index_of(WORKERS[0], WORKERS[1])
    index.store(WORKERS[0], CHAIN[:4])
    index.store(WORKERS[1], CHAIN[1:6])
    cached = match(index)
    assert cached.num_tokens == cached.num_confirmed == {WORKERS[0]: 16}


def test_a_prediction_counts_until_it_expires_and_never_as_confirmed() -> None:
    index = index_of(WORKERS[0])
    index.store(WORKERS[0], CHAIN[:2])
    index.predict(WORKERS[0], CHAIN[2:5], now_s=10.0)
    cached = match(index, now_s=10.0 + PREDICTION_TTL_S - 0.1)
    assert (cached.num_tokens, cached.num_confirmed) == ({WORKERS[0]: 20}, {WORKERS[0]: 8})
    match(index, now_s=10.0 + PREDICTION_TTL_S)
    cached = match(index, now_s=10.0 + LONGEST_PREDICTION_S)
    assert cached.num_tokens == cached.num_confirmed == {WORKERS[0]: 8}
    assert index.num_predictions == 0


def test_a_long_pause_forgets_both_generations_at_once() -> None:
    index = index_of(WORKERS[0])
    index.predict(WORKERS[0], CHAIN, now_s=10.0)
    assert match(index, now_s=100.0).num_tokens == {}


def test_an_event_confirms_a_prediction() -> None:
    index = index_of(WORKERS[0])
    index.predict(WORKERS[0], CHAIN[:3], now_s=0.0)
    index.store(WORKERS[0], CHAIN[:3])
    assert match(index, now_s=1e6).num_confirmed == {WORKERS[0]: 12}
    index.check_integrity()


def test_a_worker_that_takes_a_lost_ones_place_inherits_no_prediction() -> None:
    index = index_of(WORKERS[0])
    index.predict(WORKERS[0], CHAIN, now_s=0.0)
    index.scrub(WORKERS[0])
    index.add_worker(WORKERS[1], limit=100, scheme=SCHEME)
    assert match(index).num_tokens == {}


def test_slots_are_used_again_once_no_prediction_can_speak_of_them() -> None:
    index = index_of(WORKERS[0])
    for number in range(200):
        index.scrub(WORKERS[0])
        index.add_worker(WORKERS[0], limit=100, scheme=SCHEME)
        index.store(WORKERS[0], CHAIN)
        match(index, now_s=PREDICTION_TTL_S * number)
    assert index.num_slots < 6


def test_an_unknown_worker_gets_no_entries() -> None:
    index = PrefixIndex()
    index.store(WORKERS[0], CHAIN)
    index.predict(WORKERS[0], CHAIN, now_s=0.0)
    assert (index.num_entries(), index.num_predictions) == (0, 0)


def test_scrubbing_leaves_the_others() -> None:
    index = index_of(WORKERS[1], WORKERS[2])
    index.store(WORKERS[1], CHAIN)
    index.store(WORKERS[2], CHAIN[:3])
    index.scrub(WORKERS[1])
    assert (index.num_entries(), index.num_blocks) == (3, 3)
    assert match(index).num_tokens == {WORKERS[2]: 12}


def test_workers_of_one_pool_may_cut_their_blocks_differently() -> None:
    index = index_of(WORKERS[0])
    other = BlockScheme(8, BlockHash(b"other"))
    index.add_worker(WORKERS[1], limit=100, scheme=other)
    names = {SCHEME: CHAIN[:6], other: CHAIN[6:9]}
    index.store(WORKERS[0], CHAIN[:6])
    index.store(WORKERS[1], CHAIN[6:9])
    cached = by_worker(index, index.match(names.__getitem__, now_s=0.0))
    assert cached.num_tokens == {WORKERS[0]: 24, WORKERS[1]: 24}
    index.scrub(WORKERS[1])
    assert set(index.schemes) == {SCHEME}


def test_many_workers_that_hold_each_its_own_length_are_told_apart() -> None:
    index = PrefixIndex()
    keys = [WorkerKey(f"prefill-{number}", 1) for number in range(300)]
    for number, key in enumerate(keys):
        index.add_worker(key, limit=100, scheme=SCHEME)
        index.store(key, CHAIN[: number % 13])
        index.predict(key, CHAIN[: number % 7], now_s=0.0)
    cached = index.match(lambda _: CHAIN, now_s=0.0)
    slots = np.array([index.slot(key) for key in keys])
    assert cached.confirmed(slots).tolist() == [4 * (n % 13) for n in range(300)]
    assert cached.expected(slots).tolist() == [4 * max(n % 13, n % 7) for n in range(300)]


def test_what_a_worker_tells_beyond_its_pool_is_not_kept() -> None:
    index = index_of(WORKERS[0], limit=4)
    for _ in range(5000):
        index.store(WORKERS[0], CHAIN)
    index.check_integrity()
    assert index.num_entries() == 4


def test_names_that_come_and_go_leave_nothing_behind() -> None:
    index = index_of(WORKERS[0], limit=10)
    for number in range(20_000):
        name = BlockName(number)
        index.store(WORKERS[0], [name])
        index.remove(WORKERS[0], [name])
    index.check_integrity()
    assert index.num_blocks == 0


class IndexMachine(RuleBasedStateMachine):
    """The index against a plain model: what each worker told, what was predicted and when."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.told: dict[WorkerKey, dict[BlockName, None]] = {}
        self.predicted: dict[tuple[WorkerKey, BlockName], float] = {}
        self.now_s = 0.0

    workers = st.sampled_from(WORKERS)
    chains = st.lists(st.sampled_from(CHAIN), max_size=8, unique=True)

    def forget_predictions(self, key: WorkerKey, names: Iterable[BlockName] = CHAIN) -> None:
        for name in names:
            self.predicted.pop((key, name), None)

    @rule(key=workers)
    def join(self, key: WorkerKey) -> None:
        self.index.add_worker(key, limit=LIMIT, scheme=SCHEME)
        self.told[key] = {}
        self.forget_predictions(key)

    @rule(key=workers)
    def leave(self, key: WorkerKey) -> None:
        self.index.scrub(key)
        self.told.pop(key, None)
        self.forget_predictions(key)

    @rule(key=workers, names=chains)
    def store(self, key: WorkerKey, names: list[BlockName]) -> None:
        self.index.store(key, names)
        if key in self.told:
            told = self.told[key]
            told.update(dict.fromkeys(names))
            self.told[key] = dict.fromkeys(list(told)[:LIMIT])

    @rule(key=workers, names=chains)
    def remove(self, key: WorkerKey, names: list[BlockName]) -> None:
        self.index.remove(key, names)
        for name in names:
            self.told.get(key, {}).pop(name, None)
        self.forget_predictions(key, names)

    @rule(key=workers)
    def clear(self, key: WorkerKey) -> None:
        self.index.clear(key)
        self.told.get(key, {}).clear()
        self.forget_predictions(key)

    @rule(key=workers, length=st.integers(0, LIMIT), seconds=st.floats(0.0, 4.0))
    def predict(self, key: WorkerKey, length: int, seconds: float) -> None:
        self.now_s += seconds
        self.index.predict(key, CHAIN[:length], now_s=self.now_s)
        if key in self.told:
            for name in CHAIN[:length]:
                self.predicted[key, name] = self.now_s

    def leading(self, key: WorkerKey, youngest_s: float) -> int:
        """Tokens of the chain's start, with predictions younger than this."""
        count = 0
        for name in CHAIN:
            age_s = self.now_s - self.predicted.get((key, name), -math.inf)
            if name not in self.told[key] and age_s >= youngest_s:
                break
            count += 1
        return 4 * count

    @invariant()
    def holds(self) -> None:
        self.index.check_integrity()
        cached = match(self.index, now_s=self.now_s)
        for key in WORKERS:
            if key not in self.told:
                assert key not in cached.num_tokens
                continue
            assert cached.num_confirmed.get(key, 0) == self.leading(key, -1.0)
            # A prediction surely counts for one TTL, and surely not after two.
            found = cached.num_tokens.get(key, 0)
            least = self.leading(key, PREDICTION_TTL_S)
            assert least <= found <= self.leading(key, LONGEST_PREDICTION_S)
            assert self.index.num_entries(key) == len(self.told[key])


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
