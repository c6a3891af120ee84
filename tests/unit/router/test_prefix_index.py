from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.block_hash import BlockHash
from router.prefix_index import PREDICTION_TTL_S, PrefixIndex
from router.worker_view import WorkerKey

WORKERS = [WorkerKey("prefill-0", 1), WorkerKey("prefill-1", 1), WorkerKey("prefill-1", 2)]
CHAIN = [BlockHash(bytes([number]) * 32) for number in range(12)]
LIMIT = 6


def index_of(*keys: WorkerKey, limit: int = 100) -> PrefixIndex:
    index = PrefixIndex()
    for key in keys:
        index.add_worker(key, limit=limit)
    return index


def test_only_leading_blocks_count() -> None:
    index = index_of(WORKERS[0], WORKERS[1])
    index.store(WORKERS[0], CHAIN[:4])
    index.store(WORKERS[1], CHAIN[1:6])
    hits = index.match(CHAIN, WORKERS, now_s=0.0)
    assert list(hits) == [WORKERS[0]]
    assert hits[WORKERS[0]].num_blocks == hits[WORKERS[0]].num_confirmed_blocks == 4


def test_a_prediction_counts_until_it_expires_and_never_as_confirmed() -> None:
    index = index_of(WORKERS[0])
    index.store(WORKERS[0], CHAIN[:2])
    index.predict(WORKERS[0], CHAIN[:5], now_s=10.0)
    hit = index.match(CHAIN, WORKERS, now_s=10.0 + PREDICTION_TTL_S - 0.1)[WORKERS[0]]
    assert (hit.num_blocks, hit.num_confirmed_blocks) == (5, 2)
    hit = index.match(CHAIN, WORKERS, now_s=10.0 + PREDICTION_TTL_S)[WORKERS[0]]
    assert (hit.num_blocks, hit.num_confirmed_blocks) == (2, 2)


def test_an_event_confirms_a_prediction() -> None:
    index = index_of(WORKERS[0])
    index.predict(WORKERS[0], CHAIN[:3], now_s=0.0)
    index.store(WORKERS[0], CHAIN[:3])
    index.predict(WORKERS[0], CHAIN[:1], now_s=100.0)
    assert index.match(CHAIN, WORKERS, now_s=1e6)[WORKERS[0]].num_confirmed_blocks == 3
    index.check_integrity()


def test_an_unknown_worker_gets_no_entries() -> None:
    index = PrefixIndex()
    index.store(WORKERS[0], CHAIN)
    index.predict(WORKERS[0], CHAIN, now_s=0.0)
    assert index.num_entries() == 0


def test_scrubbing_leaves_the_others() -> None:
    index = index_of(WORKERS[1], WORKERS[2])
    index.store(WORKERS[1], CHAIN)
    index.store(WORKERS[2], CHAIN[:3])
    index.scrub(WORKERS[1])
    assert index.num_entries() == 3
    assert list(index.match(CHAIN, WORKERS, now_s=0.0)) == [WORKERS[2]]


class IndexMachine(RuleBasedStateMachine):
    """The index against a plain model: worker -> hash -> when it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.known: dict[WorkerKey, dict[BlockHash, None]] = {}
        self.until: dict[tuple[WorkerKey, BlockHash], float] = {}
        self.now_s = 0.0

    workers = st.sampled_from(WORKERS)
    chains = st.lists(st.sampled_from(CHAIN), max_size=8, unique=True)

    @rule(key=workers)
    def join(self, key: WorkerKey) -> None:
        self.index.add_worker(key, limit=LIMIT)
        self.known[key] = {}

    @rule(key=workers)
    def leave(self, key: WorkerKey) -> None:
        self.index.scrub(key)
        self.known.pop(key, None)
        assert self.index.num_entries(key) == 0

    @rule(key=workers, hashes=chains)
    def store(self, key: WorkerKey, hashes: list[BlockHash]) -> None:
        self.index.store(key, hashes)
        if key in self.known:
            self.known[key].update(dict.fromkeys(hashes))

    @rule(key=workers, hashes=chains)
    def remove(self, key: WorkerKey, hashes: list[BlockHash]) -> None:
        self.index.remove(key, hashes)
        for block_hash in hashes:
            self.known.get(key, {}).pop(block_hash, None)

    @rule(key=workers)
    def clear(self, key: WorkerKey) -> None:
        self.index.clear(key)
        self.known.get(key, {}).clear()

    @rule(key=workers, length=st.integers(0, 12), seconds=st.floats(0.0, 4.0))
    def predict(self, key: WorkerKey, length: int, seconds: float) -> None:
        self.now_s += seconds
        self.index.predict(key, CHAIN[:length], now_s=self.now_s)

    @invariant()
    def holds(self) -> None:
        self.index.check_integrity()
        later_s = self.now_s + PREDICTION_TTL_S
        for key, hit in self.index.match(CHAIN, WORKERS, now_s=later_s).items():
            # All predictions are over: only what the worker told of is left.
            assert hit.num_blocks == hit.num_confirmed_blocks
            assert set(CHAIN[: hit.num_blocks]) <= set(self.known[key])
        for key in WORKERS:
            assert self.index.num_entries(key) <= LIMIT


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
