"""One simulated worker: an engine, its links, and the state stream that tells the routers of it.

The messages are those of the real stream (`protos/relevo/v1/state.proto`), told at its pace: soon
after a change, not too often, never silent for long.
"""

import itertools
from collections.abc import Callable, Sequence

from relevo.v1 import common_pb2, state_pb2

from engine.block_hash import BlockHash
from router.block_name import BlockName
from router.worker_view import DECODE, PREFILL, WorkerKey
from rpc.description import WorkerDescription
from rpc.feed_pace import FeedPace
from sim.agenda import Agenda
from sim.engine import SimEngine
from sim.hardware import Hardware

Message = state_pb2.WatchStateResponse
HASH_ROOT = BlockHash(b"simulated" + bytes(23))
MAX_WAITING_BATCHES = 4  # as the real workers' `max_waiting_requests`


class SimWorker:
    """Owns one process. Invariant: what it tells is what its engine has at that moment."""

    def __init__(
        self,
        key: WorkerKey,
        pool: str,
        hardware: Hardware,
        agenda: Agenda,
        *,
        block_size: int,
        pace: FeedPace,
    ) -> None:
        self.key = key
        self.pool = pool
        self.agenda = agenda
        self.engine = SimEngine(hardware, agenda, block_size=block_size, on_change=self._changed)
        self.peers: Sequence[SimWorker] = ()  # decode: the prefill workers it is linked to
        self.line_free_s = 0.0  # when its line has sent what waits for it
        self.num_transferring = 0
        self.num_promised_tokens = 0
        self.num_refused = 0
        self.is_alive = True
        self.is_draining = False
        self.asked_for_s = agenda.now_s  # before it served: a machine is paid for from then on
        self.ended_s: float | None = None
        self._pace = pace
        self._listeners: list[Callable[[Sequence[Message]], None]] = []
        self._links: dict[WorkerKey, state_pb2.LinkStatus] = {}
        self._told_at_s = float("-inf")
        self._next_round_s = float("inf")

    @property
    def description(self) -> WorkerDescription:
        """As discovery tells it."""
        return WorkerDescription(
            worker_id=self.key.worker_id,
            pool=self.pool,
            incarnation=self.key.incarnation,
            address=self.key.worker_id,
            node_id="simulated",
            pid=0,
        )

    # Admission.

    def refuses(self) -> bool:
        """Whether it takes no more now; counted."""
        engine = self.engine
        num_waiting = len(engine.waiting)
        if self.pool == DECODE:
            num_waiting += self.num_transferring + len(engine.arrived)
        is_full = (
            self.is_draining or num_waiting >= MAX_WAITING_BATCHES * engine.hardware.max_num_seqs
        )
        self.num_refused += is_full
        return is_full

    def die(self) -> None:
        """All it had is gone."""
        self.is_alive = self.engine.is_alive = False
        self.ended_s = self.agenda.now_s

    def drain(self) -> None:
        """Take nothing new; what it has it ends."""
        self.is_draining = True
        self._changed()

    @property
    def is_idle(self) -> bool:
        """Whether nothing would be lost with it."""
        return self.engine.is_idle and not self.num_transferring

    def link(self, peers: Sequence["SimWorker"]) -> None:
        """Its links are these from now on; what is on its way over others arrives."""
        self.peers = peers
        self._changed()

    def expect_bytes(self, peer: WorkerKey, num_bytes: int) -> None:
        """So many more wait to come from this peer; negative: they came."""
        self._link(peer).queued_bytes += num_bytes
        self._changed()

    # The state stream.

    def listen(self, deliver: Callable[[Sequence[Message]], None]) -> None:
        """Open a stream: Hello, snapshot, load; then a batch of messages each round."""
        snapshot = Message.SnapshotChunk(
            block_hashes=map(digest_of, self.engine.cache.all_names()), last=True
        )
        deliver([Message(hello=self._hello()), Message(snapshot_chunk=snapshot)])
        deliver([Message(load=self._load())])
        self._listeners.append(deliver)
        if len(self._listeners) == 1:
            self._plan_round(self._pace.max_interval_s)

    def _changed(self) -> None:
        if self._listeners and self.is_alive:
            due_s = self._told_at_s + self._pace.min_interval_s
            if due_s < self._next_round_s:
                self._plan_round(due_s - self.agenda.now_s)

    def _plan_round(self, delay_s: float) -> None:
        due_s = self._next_round_s = self.agenda.now_s + max(delay_s, 0.0)
        self.agenda.at(due_s, lambda: self._tell(due_s))

    def _tell(self, due_s: float) -> None:
        if due_s != self._next_round_s or not self.is_alive:
            return  # another round was planned since
        self._told_at_s = self.agenda.now_s
        messages: list[Message] = []
        stored, removed = self.engine.cache.drain_events()
        if stored or removed:
            events = Message.BlockEvents(
                stored=map(digest_of, stored), removed=map(digest_of, removed)
            )
            messages.append(Message(block_events=events))
        messages.append(Message(load=self._load()))
        for deliver in self._listeners:
            deliver(messages)
        self._plan_round(self._pace.max_interval_s)

    def _hello(self) -> state_pb2.WatchStateResponse.Hello:
        engine = self.engine
        hardware = engine.hardware
        return Message.Hello(
            worker=common_pb2.WorkerRef(
                worker_id=self.key.worker_id, incarnation=self.key.incarnation
            ),
            layout=common_pb2.KVLayout(block_size=engine.block_size),
            pool=self.pool,
            max_num_seqs=hardware.max_num_seqs,
            max_model_len=hardware.max_model_len,
            num_kv_blocks=engine.cache.num_blocks,
            hash_root=HASH_ROOT,
            max_num_batched_tokens=hardware.max_num_batched_tokens,
            kv_bytes_per_token=hardware.kv_bytes_per_token,
        )

    def _load(self) -> state_pb2.WorkerLoad:
        engine = self.engine
        cache, rates = engine.cache, engine.rates
        request_s, kv_token_s = rates.step_costs.marginal()
        num_waiting = len(engine.waiting) + len(engine.arrived)
        return state_pb2.WorkerLoad(
            state="draining" if self.is_draining else "ready",
            num_running=engine.num_seqs,
            num_waiting=num_waiting,
            num_transferring=self.num_transferring,
            num_promised_tokens=self.num_promised_tokens,
            num_waiting_uncached_tokens=engine.num_uncached_tokens,
            num_computed_tokens=engine.num_computed_tokens,
            blocks=state_pb2.BlockCounts(
                free=cache.num_free,
                cached=cache.num_cached,
                used=cache.num_used,
                total=cache.num_blocks,
            ),
            prefill_tokens_per_s=rates.prefill_tokens_per_s,
            step_s=rates.decode_step_s(max(engine.num_seqs, 1)),
            request_s=request_s,
            kv_token_s=kv_token_s,
            rates_age_s=self.agenda.now_s - rates.learnt_at_s,
            links=[self._link(peer.key) for peer in self.peers if peer.is_alive],
        )

    def _link(self, peer: WorkerKey) -> state_pb2.LinkStatus:
        if peer not in self._links:
            hardware = self.engine.hardware
            self._links[peer] = state_pb2.LinkStatus(
                peer_id=peer.worker_id,
                peer_incarnation=peer.incarnation,
                state="ready",
                bandwidth_bytes_per_s=hardware.link_bytes_per_s,
                latency_s=hardware.link_latency_s,
            )
        return self._links[peer]


def digest_of(name: BlockName) -> bytes:
    """Bytes that the router shortens to this name."""
    return (name << 4).to_bytes(8, "little") + bytes(24)


def link_all(decode: Sequence[SimWorker], prefill: Sequence[SimWorker], max_links: int) -> None:
    """Give each decode worker its peers, evenly: with few prefill workers all of them."""
    for number, worker in enumerate(decode):
        assert worker.pool == DECODE
        if len(prefill) <= max_links:
            worker.link(list(prefill))
            continue
        start = number * max_links % len(prefill)
        worker.link(list(itertools.islice(itertools.cycle(prefill), start, start + max_links)))
        assert all(peer.pool == PREFILL for peer in worker.peers)
