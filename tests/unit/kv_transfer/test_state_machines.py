"""Both machines and the tickets against a network that loses, doubles, delays and reorders, and
against ends that freeze, die and come back, whatever state a transfer is in."""

import itertools
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_transfer.control import (
    Commit,
    CommitChoice,
    FailureReason,
    FetchOrder,
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
from kv_transfer.sender_state import SenderOrder, SenderState, SenderTransfer
from kv_transfer.tickets import TicketCheck, TicketGate, TicketIssuer
from tests.unit.kv_transfer.hand_over_world import (
    BLOCK,
    HOLD_S,
    LEASE_S,
    REQUEST_S,
    DecodeEnd,
    PrefillEnd,
)

ENDS = ("prefill", "decode")
DISRUPTIONS = ["freeze", "restart", "break link", "break watch", "cancel", "cancel"]


class HandOvers(RuleBasedStateMachine):
    """One prefill and one decode worker, several transfers, one link in its generations."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.ids = itertools.count(1)
        self.incarnations = itertools.count(1)
        self.epochs: dict[int, int] = {}
        self.network: list[tuple] = []
        self.frozen: set[str] = set()
        self.prefill = PrefillEnd(self.post, next(self.incarnations))
        self.decode = DecodeEnd(self.post, next(self.incarnations))

    # --- what is asked of the workers --------------------------------------------------

    @rule(num_tokens=st.integers(1, 18), cached_blocks=st.integers(0, 2), again=st.booleans())
    def router_starts(self, num_tokens: int, cached_blocks: int, again: bool) -> None:
        if self.frozen:
            return
        over = [
            i for i in self.epochs if i not in {*self.prefill.transfers, *self.decode.transfers}
        ]
        id_ = over[-1] if again and over else next(self.ids)
        if not self.prefill.memory.allocate(id_, num_tokens):
            return
        epoch = self.epochs[id_] = self.epochs.get(id_, 0) + 1
        order = SenderOrder(
            transfer_id=id_,
            epoch=epoch,
            decode_worker=self.decode.worker,
            num_tokens=num_tokens,
            hold_s=HOLD_S,
        )
        self.prefill.transfers[id_] = SenderTransfer(order, lease_s=LEASE_S, now=self.now)
        self.decode.start(id_, epoch, num_tokens, min(cached_blocks * BLOCK, num_tokens), self.now)

    @precondition(lambda self: self.prefill.transfers and "prefill" not in self.frozen)
    @rule(data=st.data(), share=st.floats(0.1, 1.0))
    def engine_computes(self, data: st.DataObject, share: float) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.prefill.transfers)))
        num_tokens = self.prefill.transfers[id_].order.num_tokens
        self.prefill.compute(id_, max(1, int(num_tokens * share)))

    @precondition(lambda self: self.prefill.transfers and "prefill" not in self.frozen)
    @rule(data=st.data(), has_finished=st.sampled_from([False] * 4 + [True]))
    def engine_commits(self, data: st.DataObject, has_finished: bool) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.prefill.transfers)))
        self.prefill.commit(id_, self.now, has_finished=has_finished)

    # --- what goes wrong ---------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.03] * 12 + [1.0, 4.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for end in ENDS:
            if end not in self.frozen:
                getattr(self, end).tick(self.now)

    @precondition(lambda self: self.network)
    @rule(data=st.data(), fate=st.sampled_from(["deliver"] * 6 + ["drop", "double"]))
    def network_acts(self, data: st.DataObject, fate: str) -> None:
        position = data.draw(st.integers(0, len(self.network) - 1))
        message = self.network[position] if fate == "double" else self.network.pop(position)
        if fate != "drop":
            self.deliver(message)

    @rule(data=st.data(), what=st.sampled_from(["nothing"] * 12 + DISRUPTIONS))
    def disrupt(self, data: st.DataObject, what: str) -> None:
        if what == "nothing":
            self.go_on(5)
        elif what == "freeze":
            self.frozen.add(data.draw(st.sampled_from(ENDS)))
        elif what == "restart":
            self.restart(data.draw(st.sampled_from(ENDS)), is_noticed=data.draw(st.booleans()))
        elif what == "break link" and not self.frozen:
            if data.draw(st.booleans()):
                self.decode.break_link(self.now)
            else:
                self.prefill.break_link()
        elif self.epochs:
            id_ = data.draw(st.sampled_from(sorted(self.epochs)))
            if what == "break watch":
                self.post("decode", "watch_broken", id_, self.epochs[id_])
            elif what == "cancel":
                for end in data.draw(st.sampled_from([ENDS, ENDS[:1], ENDS[1:]])):
                    self.network.insert(0, (end, "cancel", id_, self.epochs[id_]))

    @precondition(lambda self: not self.frozen and self.epochs)
    @rule(data=st.data())
    def client_leaves_while_something_travels(self, data: st.DataObject) -> None:
        for _ in range(30):
            if travelling := self.travelling():
                id_, epoch = data.draw(st.sampled_from(travelling))
                self.decode.on_cancel(self.now, id_, epoch)
                return
            self.go_on(1)

    def travelling(self) -> list[tuple[int, int]]:
        """Live transfers of the decode side with an operation under way, and their epochs."""
        orders = [each.order for each in self.decode.operations if not each.is_done]
        keys = [(order.transfer_id, order.epoch) for order in orders]
        return [key for key in keys if self.decode._of(*key) is not None]

    def restart(self, end: str, *, is_noticed: bool) -> None:
        """A process is replaced; the other end notices by its sockets or only by its deadlines."""
        self.frozen.discard(end)
        if end == "decode":
            self.decode = DecodeEnd(self.post, next(self.incarnations))
            return
        lost = self.decode.generation
        self.prefill = PrefillEnd(self.post, next(self.incarnations))
        if is_noticed:
            self.post("decode", "link_lost", lost)

    @precondition(lambda self: self.frozen)
    @rule()
    def thaw(self) -> None:
        self.frozen.clear()
        self.time_passes(0.0)

    # --- what goes on ------------------------------------------------------------------

    @rule()
    def decode_asks_again(self) -> None:
        if "decode" not in self.frozen:
            self.decode.ask_again()

    @precondition(lambda self: not self.frozen)
    @rule()
    def data_moves(self) -> None:
        if self.prefill.generation != self.decode.generation:
            return
        pairs = zip(self.prefill.operations, self.decode.operations, strict=False)
        for sent, received in pairs:
            if sent.is_done or received.is_done:
                continue
            order = sent.order
            assert order == received.order, "the two sides posted different operations"
            tokens = self.prefill.memory.read(order.transfer_id, order.token_start, order.token_end)
            self.prefill.operation_ended(sent)
            self.decode.arrive(received, tokens, self.now)
            return

    @rule(steps=st.integers(1, 40))
    def all_goes_well(self, steps: int) -> None:
        if self.frozen:
            self.thaw()
        self.go_on(steps)

    def go_on(self, steps: int) -> None:
        for step in range(steps):
            for id_, transfer in list(self.prefill.transfers.items()):
                if "prefill" in self.frozen or step % 4:
                    continue
                if transfer.num_offered < transfer.order.num_tokens:
                    self.prefill.compute(id_, transfer.num_offered + 5)
                else:
                    self.prefill.commit(id_, self.now, has_finished=False)
            if self.network:
                self.deliver(self.network.pop(0))
            else:
                self.decode_asks_again()
            # behind the messages, so that something can happen to a transfer meanwhile
            if step % 3 == 2 and not self.frozen:
                self.data_moves()

    def post(self, end: str, kind: str, *content: object) -> None:
        self.network.append((end, kind, *content))

    def deliver(self, message: tuple) -> None:
        end, kind, *content = message
        if end in self.frozen:
            self.network.append(message)  # it waits in a socket
            return
        before, is_old = self.prefill.state(), end == "prefill" and self.is_old(kind, content)
        getattr(getattr(self, end), f"on_{kind}")(self.now, *content)
        if is_old:
            assert self.prefill.state() == before, f"{message} is old and changed something"

    def is_old(self, kind: str, content: list) -> bool:
        if kind == "open_link":
            generation, worker = content
            newest = self.prefill.peer.incarnation if self.prefill.peer else 0
            return (worker.incarnation, generation) < (newest, self.prefill.generation)
        if kind == "fetch":
            order = content[0]
            id_, epoch, worker = order.transfer_id, order.epoch, order.decode_worker
        else:
            id_, epoch, worker = (*content, None)[:3]
        transfer = self.prefill.transfers.get(id_)
        if transfer is None:
            return True
        return not transfer.is_addressed_by(epoch, worker or transfer.order.decode_worker)

    def cancel_all(self) -> None:
        for id_, epoch in self.epochs.items():
            for end in ENDS:
                self.network.insert(0, (end, "cancel", id_, epoch))

    # --- what must hold ----------------------------------------------------------------

    def check(self) -> None:
        self.blocks_are_conserved()
        self.what_is_written_belongs_to_nobody_else()
        self.both_sides_post_the_same()
        self.nobody_outlives_a_deadline()

    @invariant()
    def blocks_are_conserved(self) -> None:
        for end in (self.prefill, self.decode):
            end.memory.check()
            assert set(end.memory.owners) <= set(end.transfers), "blocks without an owner"
        for transfer in self.prefill.transfers.values():
            assert transfer.state is not SenderState.CLOSED

    @invariant()
    def what_is_written_belongs_to_nobody_else(self) -> None:
        memory = self.decode.memory
        for operation in self.decode.operations:
            if operation.is_done or not operation.places:
                continue
            id_ = operation.order.transfer_id
            is_wanted = self.decode._of(id_, operation.order.epoch) is not None
            own = memory.owners[id_] if is_wanted else memory.quarantined
            assert set(operation.blocks) <= set(own), "a block is reused while it is written"

    @invariant()
    def both_sides_post_the_same(self) -> None:
        if (self.prefill.generation, self.prefill.peer) != (
            self.decode.generation,
            self.decode.worker,
        ):
            return
        assert len(self.decode.operations) <= len(self.prefill.operations)
        for sent, received in zip(self.prefill.operations, self.decode.operations, strict=False):
            assert sent.order == received.order

    @invariant()
    def nobody_outlives_a_deadline(self) -> None:
        if "decode" not in self.frozen:
            for transfer in self.decode.transfers.values():
                assert not transfer.machine.is_over
                assert self.now < transfer.started_at + REQUEST_S
        if "prefill" not in self.frozen:
            for id_, sender in self.prefill.transfers.items():
                assert not sender.is_open or self.now < sender.deadline
                if sender.state is SenderState.COMMITTED:
                    # also when the decode worker is frozen, its streams open
                    assert self.now < self.prefill.last_sign[id_] + LEASE_S

    def teardown(self) -> None:
        # whatever was lost: with time alone both sides end and everything is given back
        self.network.clear()
        self.frozen.clear()
        self.time_passes(REQUEST_S)
        self.time_passes(HOLD_S)
        assert not self.decode.transfers
        assert not self.prefill.transfers
        assert not self.prefill.memory.owners
        assert not self.decode.memory.owners
        assert not self.decode.memory.quarantined


HandOvers.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestHandOvers = HandOvers.TestCase


FAULTS = {
    "prefill freezes": lambda world: world.frozen.add("prefill"),
    "decode freezes": lambda world: world.frozen.add("decode"),
    "prefill restarts": lambda world: world.restart("prefill", is_noticed=True),
    "prefill restarts unnoticed": lambda world: world.restart("prefill", is_noticed=False),
    "decode restarts": lambda world: world.restart("decode", is_noticed=True),
    "link breaks": lambda world: world.decode.break_link(world.now),
    "client cancels": lambda world: world.cancel_all(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_in_every_state_ends_within_its_deadlines(fault: str) -> None:
    for num_steps in range(0, 56, 2):
        world = HandOvers()
        for num_tokens in (9, 14):
            world.router_starts(num_tokens=num_tokens, cached_blocks=0, again=False)
        world.go_on(num_steps)
        FAULTS[fault](world)
        for tick in range(80):
            world.time_passes(0.2)
            world.go_on(2)
            world.check()
            if tick == 10:
                # the router has noticed by then
                world.cancel_all()
        if "freezes" not in fault:
            assert not world.decode.transfers
        if fault != "prefill freezes":
            assert not world.prefill.transfers
        world.frozen.clear()
        for _ in range(30):
            world.time_passes(0.2)
            world.go_on(4)
        assert not world.prefill.transfers
        assert not world.decode.transfers
        # an end that nobody missed is found out by the next transfer, the one after goes well
        for again in (True, False):
            generation, num_finished = world.decode.generation, world.decode.num_finished
            world.router_starts(num_tokens=18, cached_blocks=1, again=again)
            for _ in range(30):
                world.time_passes(0.2)
                world.go_on(4)
                world.check()
        assert world.decode.num_finished == num_finished + 1
        assert world.decode.generation == generation


def receiver(num_tokens: int = 10) -> ReceiverTransfer:
    limits = ReceiverLimits(
        num_tokens=num_tokens,
        block_size=4,
        max_tokens_per_fetch=8,
        deadline=100.0,
        control_timeout_s=5.0,
        renew_s=3.0,
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
