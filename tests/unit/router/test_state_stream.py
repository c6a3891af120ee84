"""Whatever happens to the state streams, a synced worker's entries are what it holds."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from relevo.v1 import common_pb2, state_pb2

from engine.block_hash import BlockHash
from router.block_name import BlockScheme, block_names
from router.fleet import Fleet
from router.worker_state import ResyncNeededError, WorkerState
from router.worker_view import PREFILL, WorkerKey
from rpc.description import WorkerDescription

Message = state_pb2.WatchStateResponse

NUM_BLOCKS = 12
HASHES = [bytes([number]) * 32 for number in range(20)]
SCHEME = BlockScheme(16, BlockHash(b"root"))
MAX_CHUNK_HASHES = 5


class FakeWorker:
    """One place in the pool: what it holds, and its stream to the router."""

    def __init__(self, fleet: Fleet, worker_id: str) -> None:
        self.fleet = fleet
        self.worker_id = worker_id
        self.incarnation = 0
        self.state: WorkerState
        self.start()

    @property
    def key(self) -> WorkerKey:
        return WorkerKey(self.worker_id, self.incarnation)

    def start(self) -> None:
        """Another process takes the place, with nothing in its cache."""
        self.held: dict[bytes, None] = {}
        self.incarnation += 1
        description = WorkerDescription(
            worker_id=self.worker_id,
            pool=PREFILL,
            incarnation=self.incarnation,
            address="127.0.0.1:1",
            node_id="n",
            pid=1,
        )
        self.state = self.fleet.add(description, now_s=0.0)
        self.open_stream()

    def open_stream(self) -> None:
        """Hello, snapshot in chunks, load."""
        self.sequence = 0
        self.state.start_stream()
        ref = common_pb2.WorkerRef(worker_id=self.worker_id, incarnation=self.incarnation)
        hello = Message.Hello(
            worker=ref,
            layout=common_pb2.KVLayout(block_size=SCHEME.block_size),
            pool=PREFILL,
            num_kv_blocks=NUM_BLOCKS,
            hash_root=SCHEME.hash_root,
        )
        self.send(hello=hello)
        hashes = list(self.held)
        while len(hashes) > MAX_CHUNK_HASHES:
            chunk, hashes = hashes[:MAX_CHUNK_HASHES], hashes[MAX_CHUNK_HASHES:]
            self.send(snapshot_chunk=Message.SnapshotChunk(block_hashes=chunk))
        self.send(snapshot_chunk=Message.SnapshotChunk(block_hashes=hashes, last=True))
        self.send(load=state_pb2.WorkerLoad(state="ready"))

    def send(self, *, is_lost: bool = False, times: int = 1, **body: object) -> None:
        """Number a message as a worker does; the router opens the stream anew after a gap."""
        message = Message(sequence=self.sequence, **body)  # type: ignore[arg-type]
        self.sequence += 1
        if is_lost:
            return
        try:
            for _ in range(times):
                self.state.apply(message, now_s=0.0)
        except ResyncNeededError:
            self.state.disconnect(now_s=0.0)
            self.open_stream()

    def change(
        self, removed: list[bytes], stored: list[bytes], *, cleared: bool
    ) -> dict[str, Message.BlockEvents]:
        """Change the cache, within what the pool holds."""
        if cleared:
            self.held.clear()
        for block_hash in removed:
            self.held.pop(block_hash, None)
        new = [block_hash for block_hash in stored if block_hash not in self.held]
        too_many = new[NUM_BLOCKS - len(self.held) :]
        stored = [block_hash for block_hash in stored if block_hash not in too_many]
        self.held.update(dict.fromkeys(stored))
        events = Message.BlockEvents(cleared=cleared, removed=removed, stored=stored)
        return {"block_events": events}


class StreamMachine(RuleBasedStateMachine):
    """Two workers whose messages get lost or doubled, whose streams break, whose processes die."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()
        self.workers = [FakeWorker(self.fleet, f"prefill-{number}") for number in range(2)]
        self.has_gap = [False, False]

    numbers = st.integers(0, 1)
    hashes = st.lists(st.sampled_from(HASHES), max_size=8, unique=True)

    @rule(
        number=numbers,
        removed=hashes,
        stored=hashes,
        cleared=st.booleans(),
        fate=st.sampled_from(["arrives", "arrives", "arrives", "is lost", "comes twice"]),
    )
    def change(
        self, number: int, removed: list[bytes], stored: list[bytes], cleared: bool, fate: str
    ) -> None:
        worker = self.workers[number]
        body = worker.change(removed, stored, cleared=cleared)
        worker.send(is_lost=fate == "is lost", times=1 + (fate == "comes twice"), **body)
        self.has_gap[number] = fate == "is lost"

    @rule(number=numbers)
    def tick(self, number: int) -> None:
        self.workers[number].send(load=state_pb2.WorkerLoad(state="ready"))
        self.has_gap[number] = False

    @rule(number=numbers)
    def break_stream(self, number: int) -> None:
        worker = self.workers[number]
        worker.state.disconnect(now_s=0.0)
        assert self.fleet.indexes[PREFILL].num_entries(worker.key) == 0
        assert worker.key not in {view.key for view in self.fleet.pools().prefill}
        worker.open_stream()
        self.has_gap[number] = False

    @rule(number=numbers)
    def die(self, number: int) -> None:
        worker = self.workers[number]
        worker.state.disconnect(now_s=0.0)
        self.fleet.remove(worker.key)
        worker.start()
        self.has_gap[number] = False

    @rule(number=numbers, length=st.integers(0, 64).filter(lambda length: length != 32))
    @precondition(lambda self: not any(self.has_gap))
    def hashes_of_odd_length_are_not_believed(self, number: int, length: int) -> None:
        worker = self.workers[number]
        odd = Message.BlockEvents(stored=[b"x" * length])
        worker.send(block_events=odd)

    @invariant()
    def holds(self) -> None:
        index = self.fleet.indexes[PREFILL]
        index.check_integrity()
        assert {view.key for view in self.fleet.pools().prefill} == {w.key for w in self.workers}
        for worker, has_gap in zip(self.workers, self.has_gap, strict=True):
            if has_gap:
                continue
            names = block_names(list(worker.held))
            assert index.num_entries(worker.key) == len(names)
            for name in names:
                cached = index.match(lambda _, name=name: [name], now_s=0.0)  # type: ignore[misc]
                assert cached.num_confirmed[index.slot(worker.key)] == SCHEME.block_size


TestStateStream = StreamMachine.TestCase
TestStateStream.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
