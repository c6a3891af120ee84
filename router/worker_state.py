"""Everything the router knows of one worker process, kept by its state stream's messages.

described -> connected (Hello) -> synced (last snapshot chunk) -> routable (a load says ready)
routable -> suspect (a call failed) -> routable again with the stream's next message
any -> lost: the stream broke, or no sign of life; the next Hello revives it, or a stuck engine's
next load that says it lives
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from relevo.v1 import state_pb2

from router.block_name import BlockName, block_names
from router.picks import Picks
from router.prefix_index import PrefixIndex
from router.typical_rates import TypicalRates
from router.view_builder import ReadyLinks, Standing, build_view, facts_of, learn_rates, scheme_of
from router.worker_view import Pending, WorkerKey, WorkerView
from rpc.description import WorkerDescription

MIN_FROZEN_S = 2.0
FROZEN_STEPS = 4.0  # predicted step times without a sign of life


class ResyncNeededError(Exception):
    """The stream skipped or broke the order; only a new snapshot helps."""


class WrongWorkerError(Exception):
    """Another process answers at this address."""


class Change(enum.Enum):
    """What one message means for requests that wait."""

    NOTHING = enum.auto()
    ROUTING = enum.auto()  # a choice may exist now that did not


class RunningAttempt(Protocol):
    """What runs on a worker."""

    def lose_worker(self, key: WorkerKey, reason: str) -> None:
        """End because this worker shows no life."""
        ...


class WorkerState:
    """One (worker_id, incarnation).

    Invariants: its entries in the index exist only while it is synced, or as predictions; picks and
    attempts are gone when their requests are.
    """

    def __init__(
        self,
        description: WorkerDescription,
        index: PrefixIndex,
        *,
        now_s: float,
        rates: TypicalRates | None = None,
        on_view_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.description = description
        self.key = WorkerKey(description.worker_id, description.incarnation)
        self.is_described = True  # by the last discovery that answered
        self.is_connected = False
        self.is_synced = False
        self.is_suspect = False
        self.is_stuck = False  # its engine shows no life, though the process speaks
        self.has_refused = False
        self.hello: state_pb2.WatchStateResponse.Hello | None = None
        self.load: state_pb2.WorkerLoad | None = None
        self.metrics: list[state_pb2.MetricSample] = []  # the last that came with a load
        self.heard_at_s = now_s
        self.worked_at_s = float("-inf")  # something its engine made arrived on a call
        self.lost_at_s: float | None = None
        self.attempts: set[RunningAttempt] = set()
        self._index = index
        self._rates = rates or TypicalRates()
        self._on_view_change = on_view_change
        self._picks = Picks()
        self._links = ReadyLinks()
        self._distrusted_links: set[WorkerKey] = set()
        self._next_sequence = 0
        self._view: WorkerView | None = None
        self._facts: dict[str, Any] | None = None  # of the view, as the worker told them

    @property
    def state(self) -> str:
        """starting, ready, draining or lost."""
        if self.lost_at_s is not None or self.is_stuck:
            return "lost"
        if self.load is None or not self.is_synced:
            return "starting"
        return self.load.state or "starting"

    @property
    def is_routable(self) -> bool:
        """Whether new requests may go there."""
        return self.is_connected and not self.is_suspect and self.state == "ready"

    def shares_address(self, other: "WorkerState") -> bool:
        """Whether another process now serves where this one did."""
        return other is not self and other.description.address == self.description.address

    # The state stream.

    def start_stream(self) -> None:
        """A new stream opens: its numbers start from 0."""
        self._next_sequence = 0

    def apply(self, message: state_pb2.WatchStateResponse, *, now_s: float) -> Change:
        """Take the next message; ResyncNeededError or WrongWorkerError end the stream."""
        if message.sequence < self._next_sequence:
            return Change.NOTHING  # delivered twice
        if message.sequence > self._next_sequence:
            raise ResyncNeededError(f"Got {message.sequence = } but expected {self._next_sequence}")
        self._next_sequence += 1
        self.heard_at_s = now_s
        revived, self.is_suspect = self.is_suspect, False
        if revived:
            self._changed()
        changed = self._apply_body(message, now_s)
        return Change.ROUTING if changed or revived else Change.NOTHING

    def _apply_body(self, message: state_pb2.WatchStateResponse, now_s: float) -> bool:
        kind = message.WhichOneof("message")
        if kind == "hello":
            self._apply_hello(message.hello)
            return False
        if not self.is_connected:
            raise ResyncNeededError(f"Got {kind} before the Hello")
        if kind == "snapshot_chunk":
            self._index.store(self.key, _names(message.snapshot_chunk.block_hashes))
            self.is_synced = self.is_synced or message.snapshot_chunk.last
            if message.snapshot_chunk.last:
                self._changed()
            return message.snapshot_chunk.last
        if kind == "block_events":
            self._apply_block_events(message.block_events)
            return False
        if kind == "load":
            self._apply_load(message.load, now_s)
            return True
        raise ResyncNeededError(f"Got a message this version does not know: {kind}")

    def _apply_hello(self, hello: state_pb2.WatchStateResponse.Hello) -> None:
        speaker = WorkerKey(hello.worker.worker_id, hello.worker.incarnation)
        if speaker != self.key:
            raise WrongWorkerError(f"Got {speaker = } but expected {self.key}")
        self.hello = hello
        self.is_connected, self.is_synced = True, False
        self.lost_at_s = None
        self._index.add_worker(self.key, limit=hello.num_kv_blocks, scheme=scheme_of(hello))
        self._facts = None
        self._changed()

    def _apply_block_events(self, events: state_pb2.WatchStateResponse.BlockEvents) -> None:
        if events.cleared:
            self._index.clear(self.key)
            self._changed()  # it has another slot
        self._index.remove(self.key, _names(events.removed))
        self._index.store(self.key, _names(events.stored))

    def _apply_load(self, load: state_pb2.WorkerLoad, now_s: float) -> None:
        self.load = load
        if load.metrics:
            self.metrics = list(load.metrics)
        self.has_refused = False
        self.is_stuck = load.heartbeat_age_s > self._longest_age_s()
        self._distrusted_links.clear()
        self._picks.report_arrived(now_s=now_s)
        learn_rates(self._rates, self.key, self.description.pool, load)
        self._facts = None
        self._changed()

    def disconnect(self, *, now_s: float) -> None:
        """The stream ended: route nothing new here, believe nothing of its cache."""
        self.is_connected = self.is_synced = False
        if self.hello is not None and self.lost_at_s is None:
            self.lost_at_s = now_s
        self.forget()
        self._changed()

    def forget(self) -> None:
        """Believe nothing of its cache and its speed any more."""
        self._index.scrub(self.key)
        self._rates.forget(self.key)

    # Signs of life.

    def heartbeat_age_s(self, now_s: float) -> float:
        """Since the engine last showed life, as far as we can tell."""
        reported_s = self.load.heartbeat_age_s if self.load is not None else 0.0
        return max(now_s - self.heard_at_s, 0.0) + reported_s

    def is_silent(self, now_s: float) -> bool:
        """Whether its state stream tells of no life."""
        return self.heartbeat_age_s(now_s) > self._longest_age_s()

    def give_up(self, *, now_s: float) -> bool:
        """Route nothing to a silent worker, end what gets nothing from it; True if it is news."""
        # While its tokens arrive only its state stream is lost, and what runs there goes on.
        if now_s - self.worked_at_s > self._longest_age_s():
            self.fail_attempts(f"no sign of life for {self.heartbeat_age_s(now_s):.1f} s")
        if not self.is_connected:
            return False
        if now_s - self.heard_at_s > MIN_FROZEN_S:
            self.disconnect(now_s=now_s)
            return True
        was_stuck, self.is_stuck = self.is_stuck, True
        self._changed()
        return not was_stuck

    def _longest_age_s(self) -> float:
        step_s = self.load.predicted_step_s if self.load is not None else 0.0
        return max(MIN_FROZEN_S, FROZEN_STEPS * step_s)

    def fail_attempts(self, reason: str) -> None:
        """End what runs here."""
        for attempt in list(self.attempts):
            attempt.lose_worker(self.key, reason)

    def suspect(self) -> None:
        """A call failed to reach it: avoid it until its stream speaks again."""
        self.is_suspect = True
        self._changed()

    def distrust_link(self, peer: WorkerKey) -> None:
        """A transfer over it failed: avoid it until the next load tells of it."""
        self._distrusted_links.add(peer)
        self._changed()

    def refuse(self) -> None:
        """It refused a request: full, until its next load says otherwise."""
        self.has_refused = True
        self._changed()

    # Own picks.

    def add_pick(self, pick_id: int, pending: Pending, *, now_s: float) -> None:
        """Count a request that is on its way."""
        self._picks.add(pick_id, pending, now_s=now_s)
        self._changed()

    def acknowledge_pick(self, pick_id: int) -> None:
        """The worker has it: its next report includes it."""
        self._picks.acknowledge(pick_id)

    def drop_pick(self, pick_id: int) -> None:
        """The request is over, or never arrived."""
        if self._picks.drop(pick_id):
            self._changed()

    @property
    def num_picks(self) -> int:
        """Picks no report includes yet."""
        return len(self._picks)

    # What others see.

    def _changed(self) -> None:
        self._view = None
        self._on_view_change()

    def full_load(self) -> state_pb2.WorkerLoad:
        """The last load, with the last metrics in it."""
        full = state_pb2.WorkerLoad()
        if self.load is not None:
            full.CopyFrom(self.load)
        if not full.metrics:
            full.metrics.extend(self.metrics)
        return full

    def view(self) -> WorkerView | None:
        """Plain data of this moment; None before the Hello."""
        if self._view is None and self.hello is not None:
            standing = Standing(
                is_routable=self.is_routable,
                has_refused=self.has_refused,
                pending=self._picks.total(),
                links=self._links.of(self.load),
                distrusted_links=self._distrusted_links,
                slot=self._index.slot(self.key),
            )
            if self._facts is None:
                self._facts = facts_of(self.hello, self.load, self._rates)
            self._view = build_view(self._facts, standing)
        return self._view


def _names(hashes: Sequence[bytes]) -> list[BlockName]:
    try:
        return block_names(hashes)
    except ValueError as error:
        raise ResyncNeededError(str(error)) from error
