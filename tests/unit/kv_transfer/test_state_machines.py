"""Both machines and the tickets against a network that loses, doubles, delays and reorders."""

import itertools
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kv_transfer.control import (
    Commit,
    CommitChoice,
    FailureReason,
    FetchOrder,
    FetchReply,
    FetchVerdict,
    Offer,
    WorkerRef,
)
from kv_transfer.receiver_state import (
    Fail,
    Fetch,
    Finish,
    ReceiverLimits,
    ReceiverState,
    ReceiverTransfer,
    Reserve,
    Watch,
)
from kv_transfer.sender_state import EndCause, SenderOrder, SenderState, SenderTransfer
from kv_transfer.tickets import TicketCheck, TicketGate, TicketIssuer

LEASE_S, HOLD_S, REQUEST_S = 10.0, 60.0, 50.0
BLOCK = 4


@dataclass
class DecodeTransfer:
    machine: ReceiverTransfer
    num_tokens: int
    num_cached: int
    present: set[int] = field(default_factory=set)
    waiting: list[Fetch] = field(default_factory=list)
    watch_is_open: bool = True
    outcome: object = None
    started: float = 0.0


@dataclass
class Operation:
    order: FetchOrder
    is_done: bool = False


class HandOvers(RuleBasedStateMachine):
    """One prefill and one decode worker, several transfers, one link in its generations."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.ids = itertools.count(1)
        self.incarnations = itertools.count(1)
        self.prefill: dict[int, SenderTransfer] = {}
        self.decode: dict[int, DecodeTransfer] = {}
        self.closed: list[SenderTransfer] = []
        self.network: list[tuple] = []
        self.worker = WorkerRef("decode-0", next(self.incarnations))
        self.generation = 0
        self.owner: dict[int, DecodeTransfer] = {}

    @initialize()
    def first_link(self) -> None:
        self.new_link()

    def new_link(self) -> None:
        self.generation += 1
        self.gate, self.issuer = TicketGate(), TicketIssuer()
        self.sent: list[Operation] = []
        self.received: list[Operation] = []

    # --- the outside -------------------------------------------------------------------

    @rule(num_tokens=st.integers(1, 18), cached_blocks=st.integers(0, 2), early=st.booleans())
    def start(self, num_tokens: int, cached_blocks: int, early: bool) -> None:
        id_ = next(self.ids)
        order = SenderOrder(
            transfer_id=id_,
            epoch=1,
            decode_worker=self.worker,
            num_tokens=num_tokens,
            hold_s=HOLD_S,
        )
        self.prefill[id_] = SenderTransfer(order, lease_s=LEASE_S, now=self.now)
        limits = ReceiverLimits(
            num_tokens=num_tokens,
            block_size=BLOCK,
            max_tokens_per_fetch=2 * BLOCK,
            deadline=self.now + REQUEST_S,
            control_timeout_s=5.0,
        )
        cached = min(cached_blocks * BLOCK, num_tokens)
        self.decode[id_] = DecodeTransfer(
            ReceiverTransfer(limits), num_tokens, cached, started=self.now
        )
        self.prefill[id_].watch_opened()

    @precondition(lambda self: self.prefill)
    @rule(data=st.data(), share=st.floats(0.1, 1.0))
    def compute(self, data: st.DataObject, share: float) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.prefill)))
        transfer = self.prefill[id_]
        if transfer.offer(max(1, int(transfer.order.num_tokens * share))):
            self.tell(id_)

    @precondition(lambda self: self.prefill)
    @rule(data=st.data(), finished=st.booleans())
    def commit(self, data: st.DataObject, finished: bool) -> None:
        self.commit_one(data.draw(st.sampled_from(sorted(self.prefill))), finished=finished)

    def commit_one(self, id_: int, *, finished: bool) -> None:
        transfer = self.prefill[id_]
        reason = "stop" if finished and id_ % 5 == 0 else ""
        choice = CommitChoice(token_id=id_, finish_reason=reason)
        commit = Commit(num_tokens=transfer.order.num_tokens, choices=(choice,))
        if transfer.finish_prefill(commit, self.now):
            self.tell(id_)

    @precondition(lambda self: self.prefill)
    @rule(data=st.data(), does=st.sampled_from([False] * 4 + [True]))
    def router_cancels(self, data: st.DataObject, does: bool) -> None:
        if not does:
            self.calm(3)
            return
        if not self.prefill:
            return
        id_ = data.draw(st.sampled_from(sorted(self.prefill)))
        self.prefill[id_].end(EndCause.CANCELLED)
        self.collect()

    @precondition(lambda self: self.decode)
    @rule(data=st.data(), does=st.sampled_from([False] * 4 + [True]))
    def client_cancels(self, data: st.DataObject, does: bool) -> None:
        if not does:
            self.calm(3)
            return
        id_ = data.draw(st.sampled_from(sorted(self.decode)))
        self.act(id_, self.decode[id_].machine.fail(FailureReason.CANCELLED))

    @rule(seconds=st.sampled_from([0.03] * 12 + [1.0, 4.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for transfer in list(self.prefill.values()):
            transfer.tick(self.now)
        for id_ in list(self.decode):
            if id_ in self.decode:
                self.act(id_, self.decode[id_].machine.tick(self.now))
        self.collect()

    # --- the network -------------------------------------------------------------------

    @precondition(lambda self: self.network)
    @rule(data=st.data(), fate=st.sampled_from(["deliver"] * 6 + ["drop", "double"]))
    def network_acts(self, data: st.DataObject, fate: str) -> None:
        position = data.draw(st.integers(0, len(self.network) - 1))
        message = self.network[position] if fate == "double" else self.network.pop(position)
        if fate != "drop":
            self.deliver(message)

    @precondition(lambda self: self.decode)
    @rule(data=st.data())
    def watch_breaks(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.decode)))
        transfer = self.decode[id_]
        if transfer.watch_is_open:
            self.close_watch(id_)
            self.act(id_, transfer.machine.watch_broken(self.now))

    @rule()
    def ask_again(self) -> None:
        if self.issuer.open_order is not None:
            self.network.append(("fetch", self.issuer.open_order))

    @rule()
    def data_moves(self) -> None:
        for sent, received in zip(self.sent, self.received, strict=False):
            if sent.is_done:
                continue
            assert sent.order == received.order, "the two sides posted different operations"
            sent.is_done = received.is_done = True
            source = self.owner_of_send(sent)
            assert source.state is not SenderState.CLOSED, "blocks were given back while read"
            source.operation_ended()
            self.collect()
            self.arrive(received.order)
            return

    @rule(steps=st.integers(1, 40))
    def all_goes_well(self, steps: int) -> None:
        self.calm(steps)

    def calm(self, steps: int) -> None:
        """Nothing goes wrong for a while."""
        for _ in range(steps):
            for id_ in sorted(self.prefill):
                self.compute_more(id_)
            if self.network:
                self.deliver(self.network.pop(0))
            else:
                self.ask_again()
            self.data_moves()

    @rule(what=st.sampled_from(["calm"] * 6 + ["link", "prefill", "decode"]))
    def disrupt(self, what: str) -> None:
        if what == "calm":
            self.calm(15)
        elif what == "link":
            self.link_breaks()
        elif what == "prefill":
            self.prefill_worker_restarts()
        elif what == "decode":
            self.decode_worker_restarts()

    def compute_more(self, id_: int) -> None:
        transfer = self.prefill[id_]
        if transfer.offer(transfer.num_offered + 5):
            self.tell(id_)
        elif transfer.commit is None:
            self.commit_one(id_, finished=False)

    def link_breaks(self) -> None:
        pending = [operation for operation in self.sent if not operation.is_done]
        for id_ in list(self.decode):
            self.act(id_, self.decode[id_].machine.fail(FailureReason.LINK_BROKEN))
        for operation in pending:
            self.owner_of_send(operation).operation_ended()
        self.new_link()
        self.collect()

    def prefill_worker_restarts(self) -> None:
        self.link_breaks()
        for id_ in list(self.prefill):
            if self.prefill[id_].state is not SenderState.CLOSED:
                del self.prefill[id_]

    def decode_worker_restarts(self) -> None:
        for id_ in list(self.decode):
            self.close_watch(id_)
        self.decode.clear()
        self.link_breaks()
        self.worker = WorkerRef("decode-0", next(self.incarnations))

    # --- plumbing ----------------------------------------------------------------------

    def tell(self, id_: int) -> None:
        transfer = self.prefill[id_]
        if id_ in self.decode and self.decode[id_].watch_is_open:
            self.network.append(("tell", id_, transfer.commit or Offer(transfer.num_offered)))

    def close_watch(self, id_: int) -> None:
        if self.decode[id_].watch_is_open and id_ in self.prefill:
            self.prefill[id_].watch_closed(self.now)
        self.decode[id_].watch_is_open = False

    def owner_of_send(self, operation: Operation) -> SenderTransfer:
        id_ = operation.order.transfer_id
        return self.prefill.get(id_) or next(t for t in self.closed if t.order.transfer_id == id_)

    def deliver(self, message: tuple) -> None:
        kind, *rest = message
        if kind == "tell" and rest[0] in self.decode:
            self.act(rest[0], self.decode[rest[0]].machine.hear(rest[1], self.now))
        elif kind == "fetch":
            self.prefill_gets(rest[0])
        elif kind == "reply" and self.issuer.open_order == rest[0]:
            self.decode_gets(rest[0], rest[1])
        elif kind == "release" and rest[0] in self.prefill:
            self.prefill[rest[0]].end(EndCause.RELEASED)
            self.collect()

    def prefill_gets(self, order: FetchOrder) -> None:
        if order.generation != self.generation:
            return
        check = self.gate.check(order)
        if check is TicketCheck.CONFLICT:
            self.link_breaks()
        elif check is TicketCheck.REPEAT:
            self.network.append(("reply", order, FetchReply(FetchVerdict.GRANTED)))
        elif check is TicketCheck.NEXT:
            transfer = self.prefill.get(order.transfer_id)
            verdict = transfer.fetch(order) if transfer else FetchVerdict.GONE
            if verdict is FetchVerdict.GRANTED:
                self.gate.grant(order)
                self.sent.append(Operation(order))
            self.network.append(("reply", order, FetchReply(verdict)))

    def decode_gets(self, order: FetchOrder, reply: FetchReply) -> None:
        self.issuer.settle(reply.verdict)
        if reply.verdict is FetchVerdict.GRANTED:
            self.received.append(Operation(order))
        transfer = self.decode.get(order.transfer_id)
        if transfer is not None:
            fetch = Fetch(order.token_start, order.token_end)
            actions = transfer.machine.fetch_replied(fetch, reply.verdict, self.now)
            self.act(order.transfer_id, actions)
        self.next_order()

    def next_order(self) -> None:
        if self.issuer.open_order is not None:
            return
        for id_, transfer in self.decode.items():
            if transfer.waiting and not transfer.machine.is_over:
                fetch = transfer.waiting.pop(0)
                order = FetchOrder(
                    transfer_id=id_,
                    epoch=1,
                    decode_worker=self.worker,
                    generation=self.generation,
                    ticket=0,
                    token_start=fetch.token_start,
                    token_end=fetch.token_end,
                )
                self.network.append(("fetch", self.issuer.issue(order)))
                return

    def arrive(self, order: FetchOrder) -> None:
        transfer = self.decode.get(order.transfer_id)
        if transfer is None or transfer.machine.is_over:
            return
        arriving = set(range(order.token_start, order.token_end))
        assert not arriving & transfer.present, "a token travelled twice"
        transfer.present |= arriving
        fetch = Fetch(order.token_start, order.token_end)
        self.act(order.transfer_id, transfer.machine.arrived(fetch, b"", self.now))

    def act(self, id_: int, actions: list) -> None:
        transfer = self.decode[id_]
        for action in actions:
            assert transfer.outcome is None, "something came after the end"
            if isinstance(action, Reserve):
                transfer.present |= set(range(transfer.num_cached))
                self.act(id_, transfer.machine.reserved(transfer.num_cached, self.now))
            elif isinstance(action, Fetch):
                transfer.waiting.append(action)
                self.next_order()
            elif isinstance(action, Watch):
                self.watch_again(id_)
            else:
                self.finish(id_, action)

    def watch_again(self, id_: int) -> None:
        transfer = self.decode[id_]
        source = self.prefill.get(id_)
        if source is None or not source.is_addressed_by(1, self.worker) or not source.is_open:
            self.act(id_, transfer.machine.not_found())
            return
        transfer.watch_is_open = True
        source.watch_opened()
        if source.num_offered:
            self.tell(id_)

    def finish(self, id_: int, action: Finish | Fail) -> None:
        transfer = self.decode[id_]
        transfer.outcome = action
        if isinstance(action, Finish):
            assert action.commit.choices[0].token_id == id_
            if not action.commit.choices[0].finish_reason:
                assert transfer.present == set(range(transfer.num_tokens))
        self.close_watch(id_)
        del self.decode[id_]
        self.network.append(("release", id_))
        self.next_order()

    def collect(self) -> None:
        for id_, transfer in list(self.prefill.items()):
            if transfer.state is SenderState.CLOSED:
                self.closed.append(self.prefill.pop(id_))

    # --- what must hold ----------------------------------------------------------------

    @invariant()
    def order_is_the_same(self) -> None:
        if not self.generation:
            return
        for sent, received in zip(self.sent, self.received, strict=False):
            assert sent.order == received.order
        assert len(self.received) <= len(self.sent)

    @invariant()
    def nobody_outlives_its_deadline(self) -> None:
        for transfer in self.decode.values():
            assert not transfer.machine.is_over
            assert self.now < transfer.started + REQUEST_S
        for transfer in self.prefill.values():
            assert not transfer.is_open or self.now < transfer.deadline

    def teardown(self) -> None:
        # whatever was lost: with time alone both sides end and everything is given back
        if not self.generation:
            return
        self.network.clear()
        self.time_passes(REQUEST_S)
        self.time_passes(HOLD_S)
        assert not self.decode
        self.link_breaks()
        assert not self.prefill
        assert all(transfer.num_granted == 0 for transfer in self.closed)


HandOvers.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestHandOvers = HandOvers.TestCase


def receiver(num_tokens: int = 10) -> ReceiverTransfer:
    limits = ReceiverLimits(
        num_tokens=num_tokens,
        block_size=4,
        max_tokens_per_fetch=8,
        deadline=100.0,
        control_timeout_s=5.0,
    )
    return ReceiverTransfer(limits)


def commit_of(num_tokens: int) -> Commit:
    return Commit(num_tokens=num_tokens, choices=(CommitChoice(token_id=1),))


def test_whole_blocks_until_the_commit_then_the_tail() -> None:
    machine = receiver(10)
    assert machine.hear(Offer(7), 0.0) == [Reserve()]
    assert machine.reserved(0, 0.0) == [Fetch(0, 4)]
    assert machine.fetch_replied(Fetch(0, 4), FetchVerdict.GRANTED, 0.0) == []
    assert machine.hear(commit_of(10), 0.0) == [Fetch(4, 10)]
    assert machine.fetch_replied(Fetch(4, 10), FetchVerdict.GRANTED, 0.0) == []
    assert machine.arrived(Fetch(0, 4), b"", 0.0) == []
    assert machine.arrived(Fetch(4, 10), b"", 0.0) == [Finish(commit_of(10))]
    assert machine.state is ReceiverState.DONE


def test_commit_for_another_length_or_without_a_token_is_no_commit() -> None:
    assert receiver(10).hear(commit_of(9), 0.0) == [Fail(FailureReason.INVALID_COMMIT)]
    nothing = replace(commit_of(10), choices=())
    assert receiver(10).hear(nothing, 0.0) == [Fail(FailureReason.INVALID_COMMIT)]
    assert receiver(10).hear(Offer(11), 0.0) == [Fail(FailureReason.INVALID_COMMIT)]


def test_not_yet_is_asked_again_after_a_pause() -> None:
    machine = receiver(8)
    machine.hear(Offer(8), 0.0)
    assert machine.reserved(0, 0.0) == [Fetch(0, 8)]
    assert machine.fetch_replied(Fetch(0, 8), FetchVerdict.NOT_YET, 1.0) == []
    assert machine.tick(1.0) == []
    assert 1.0 < machine.deadline < 1.1
    assert machine.tick(machine.deadline) == [Fetch(0, 8)]


def test_a_watch_that_stays_broken_fails_before_the_commit_only() -> None:
    machine = receiver(8)
    machine.watch_broken(0.0)
    assert machine.tick(0.02) == [Watch()]
    machine.watch_broken(0.03)
    assert machine.tick(5.0) == [Fail(FailureReason.CONTROL_LOST)]
    machine = receiver(8)
    machine.hear(commit_of(8), 0.0)
    machine.reserved(0, 0.0)
    machine.watch_broken(0.0)
    assert machine.tick(6.0) == [Watch()]


def test_tickets() -> None:
    order = FetchOrder(
        transfer_id=1,
        epoch=1,
        decode_worker=WorkerRef("decode-0", 1),
        generation=1,
        ticket=0,
        token_start=0,
        token_end=4,
    )
    issuer, gate = TicketIssuer(), TicketGate()
    first = issuer.issue(order)
    assert gate.check(first) is TicketCheck.NEXT
    issuer.settle(FetchVerdict.NOT_YET)
    first = issuer.issue(order)
    assert first.ticket == 0
    gate.grant(first)
    issuer.settle(FetchVerdict.GRANTED)
    assert gate.check(first) is TicketCheck.REPEAT
    assert gate.check(replace(first, token_end=8)) is TicketCheck.CONFLICT
    second = issuer.issue(order)
    assert second.ticket == 1
    assert gate.check(second) is TicketCheck.NEXT
    gate.grant(second)
    assert gate.check(first) is TicketCheck.STALE
    assert gate.check(replace(second, ticket=3)) is TicketCheck.CONFLICT
