"""Two workers, their memory and a network that may do anything: the machines' world, no torch.

Each end does with the machines and tickets what `KVSender`, `KVReceiver` and the links do. Memory
is modelled token by token, so that a block which was reused too early shows as a wrong token: a
receive that has begun writes the places it was given, whoever owns them by then.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
    ReceiverTransfer,
    Reserve,
    Watch,
)
from kv_transfer.sender_state import EndCause, SenderState, SenderTransfer
from kv_transfer.tickets import TicketCheck, TicketGate, TicketIssuer

LEASE_S, HOLD_S, REQUEST_S, OPERATION_S = 10.0, 60.0, 50.0, 5.0
BLOCK = 4
NUM_BLOCKS = 12

Send = Callable[..., None]


class Memory:
    """A pool of blocks; every token in it knows whose it is."""

    def __init__(self) -> None:
        self.free = list(range(NUM_BLOCKS))
        self.owners: dict[int, list[int]] = {}
        # nobody's, and not to be given away: an operation may still write it
        self.quarantined: list[int] = []
        self.tokens: dict[tuple[int, int], tuple[int, int]] = {}

    def allocate(self, owner: int, num_tokens: int) -> bool:
        num_blocks = -(-num_tokens // BLOCK)
        if len(self.free) < num_blocks:
            return False
        self.owners[owner], self.free = self.free[:num_blocks], self.free[num_blocks:]
        return True

    def give_back(self, owner: int, in_flight: Sequence[int] = ()) -> None:
        blocks = self.owners.pop(owner)
        self.quarantined += in_flight
        self._set_free([block for block in blocks if block not in in_flight])

    def end_quarantine(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.quarantined.remove(block)
        self._set_free([block for block in blocks if block not in self.quarantined])

    def places(self, owner: int, start: int, end: int) -> list[tuple[int, int]]:
        blocks = self.owners[owner]
        return [(blocks[token // BLOCK], token % BLOCK) for token in range(start, end)]

    def write(self, owner: int, start: int, values: list[tuple[int, int]]) -> None:
        self.put(self.places(owner, start, start + len(values)), values)

    def put(self, places: list[tuple[int, int]], values: list[tuple[int, int]]) -> None:
        self.tokens.update(zip(places, values, strict=True))

    def read(self, owner: int, start: int, end: int) -> list[tuple[int, int]]:
        return [self.tokens[place] for place in self.places(owner, start, end)]

    def _set_free(self, blocks: list[int]) -> None:
        self.free += blocks
        for block, offset in itertools.product(blocks, range(BLOCK)):
            self.tokens.pop((block, offset), None)

    def check(self) -> None:
        held = [block for blocks in self.owners.values() for block in blocks]
        held += set(self.quarantined)
        assert sorted(held + self.free) == list(range(NUM_BLOCKS)), "blocks were lost or doubled"


def true_tokens(id_: int, start: int, end: int) -> list[tuple[int, int]]:
    return [(id_, token) for token in range(start, end)]


@dataclass
class Operation:
    order: FetchOrder
    posted_at: float
    is_done: bool = False
    # of the decode side: where it writes; nowhere when nobody wanted it as it began
    places: list[tuple[int, int]] = field(default_factory=list)

    @property
    def blocks(self) -> list[int]:
        return sorted({block for block, _ in self.places})


class PrefillEnd:
    """A prefill worker's process."""

    def __init__(self, send: Send, incarnation: int) -> None:
        self.send, self.incarnation = send, incarnation
        self.memory = Memory()
        self.transfers: dict[int, SenderTransfer] = {}
        self.last_sign: dict[int, float] = {}
        self.generation = 0
        self.peer: WorkerRef | None = None
        self.gate = TicketGate()
        self.operations: list[Operation] = []

    def state(self) -> object:
        """Everything a message could change."""
        transfers = {
            id_: (each.state, each.num_granted, each.num_offered, each.deadline)
            for id_, each in self.transfers.items()
        }
        return transfers, self.generation, len(self.operations), dict(self.memory.owners)

    def compute(self, id_: int, num_tokens: int) -> None:
        transfer = self.transfers[id_]
        before = transfer.num_offered
        if transfer.offer(num_tokens):
            now_offered = transfer.num_offered
            self.memory.write(id_, before, true_tokens(id_, before, now_offered))
            self.send("decode", "tell", id_, transfer.order.epoch, Offer(now_offered))

    def commit(self, id_: int, now: float, *, has_finished: bool) -> None:
        transfer = self.transfers[id_]
        self.compute(id_, transfer.order.num_tokens)
        choice = CommitChoice(token_id=id_, finish_reason="stop" if has_finished else "")
        commit = Commit(num_tokens=transfer.order.num_tokens, choices=(choice,))
        if transfer.finish_prefill(commit, now):
            self.last_sign[id_] = now
            self.send("decode", "tell", id_, transfer.order.epoch, commit)

    def on_watch(self, now: float, id_: int, epoch: int, worker: WorkerRef) -> None:
        transfer = self.transfers.get(id_)
        if transfer is None or not transfer.is_open or not transfer.is_addressed_by(epoch, worker):
            self.send("decode", "not_found", id_, epoch)
            return
        self._renew(transfer, now)
        if transfer.num_offered:
            told = transfer.commit or Offer(transfer.num_offered)
            self.send("decode", "tell", id_, epoch, told)

    def on_fetch(self, now: float, order: FetchOrder) -> None:
        if (order.decode_worker, order.generation) != (self.peer, self.generation):
            return
        check = self.gate.check(order)
        if check is TicketCheck.CONFLICT:
            self.break_link()
        elif check is TicketCheck.REPEAT:
            self.send("decode", "reply", order, FetchVerdict.GRANTED)
        elif check is TicketCheck.NEXT:
            self.send("decode", "reply", order, self._decide(order, now))

    def _decide(self, order: FetchOrder, now: float) -> FetchVerdict:
        transfer = self.transfers.get(order.transfer_id)
        if transfer is None:
            return FetchVerdict.GONE
        if transfer.is_addressed_by(order.epoch, order.decode_worker):
            self._renew(transfer, now)
        verdict = transfer.fetch(order)
        if verdict is FetchVerdict.GRANTED:
            self.gate.grant(order)
            self.operations.append(Operation(order, now))
        return verdict

    def _renew(self, transfer: SenderTransfer, now: float) -> None:
        transfer.renew(now)
        self.last_sign[transfer.order.transfer_id] = now

    def on_release(self, _now: float, id_: int, epoch: int) -> None:
        if id_ in self.transfers and self.transfers[id_].order.epoch == epoch:
            self.end(id_, EndCause.RELEASED)

    def on_cancel(self, _now: float, id_: int, epoch: int) -> None:
        if id_ in self.transfers and self.transfers[id_].order.epoch == epoch:
            self.end(id_, EndCause.CANCELLED)

    def on_open_link(self, _now: float, generation: int, peer: WorkerRef) -> None:
        newest = (self.peer.incarnation if self.peer else 0, self.generation)
        if (peer.incarnation, generation) > newest:
            self.break_link()
            self.peer, self.generation = peer, generation
            self.gate, self.operations = TicketGate(), []
        if (peer, generation) == (self.peer, self.generation):
            self.send("decode", "link_ready", generation)

    def break_link(self) -> None:
        for operation in self.operations:
            if not operation.is_done:
                self.operation_ended(operation)
        self.send("decode", "link_lost", self.generation)

    def operation_ended(self, operation: Operation) -> None:
        operation.is_done = True
        self.transfers[operation.order.transfer_id].operation_ended()
        self.collect()

    def end(self, id_: int, cause: EndCause) -> None:
        self.transfers[id_].end(cause)
        self.collect()

    def tick(self, now: float) -> None:
        for transfer in self.transfers.values():
            transfer.tick(now)
        self.collect()
        if any(
            not each.is_done and now >= each.posted_at + OPERATION_S for each in self.operations
        ):
            self.break_link()

    def collect(self) -> None:
        for id_, transfer in list(self.transfers.items()):
            if transfer.state is SenderState.CLOSED:
                del self.transfers[id_]
                self.memory.give_back(id_)


@dataclass
class DecodeTransfer:
    machine: ReceiverTransfer
    epoch: int
    num_tokens: int
    num_cached: int
    started_at: float
    waiting: list[Fetch] = field(default_factory=list)


class DecodeEnd:
    """A decode worker's process."""

    def __init__(self, send: Send, incarnation: int) -> None:
        self.send = send
        self.worker = WorkerRef("decode-0", incarnation)
        self.memory = Memory()
        self.transfers: dict[int, DecodeTransfer] = {}
        self.reserving: list[int] = []
        self.num_finished = 0
        self.generation = 0
        self.new_link()

    def new_link(self) -> None:
        self.generation += 1
        self.is_linked = False
        self.issuer = TicketIssuer()
        self.issued_at = 0.0
        self.operations: list[Operation] = []
        self.send("prefill", "open_link", self.generation, self.worker)

    def start(self, id_: int, epoch: int, num_tokens: int, num_cached: int, now: float) -> None:
        limits = ReceiverLimits(
            num_tokens=num_tokens,
            block_size=BLOCK,
            max_tokens_per_fetch=2 * BLOCK,
            deadline=now + REQUEST_S,
            control_timeout_s=OPERATION_S,
            renew_s=LEASE_S / 3,
        )
        self.transfers[id_] = DecodeTransfer(
            ReceiverTransfer(limits), epoch, num_tokens, num_cached, now
        )
        self.send("prefill", "watch", id_, epoch, self.worker)

    def on_tell(self, now: float, id_: int, epoch: int, message: Offer | Commit) -> None:
        if (transfer := self._of(id_, epoch)) is not None:
            self.act(id_, transfer.machine.hear(message, now), now)

    def on_not_found(self, now: float, id_: int, epoch: int) -> None:
        if (transfer := self._of(id_, epoch)) is not None:
            self.act(id_, transfer.machine.not_found(), now)

    def on_watch_broken(self, now: float, id_: int, epoch: int) -> None:
        if (transfer := self._of(id_, epoch)) is not None:
            self.act(id_, transfer.machine.watch_broken(now), now)

    def on_cancel(self, now: float, id_: int, epoch: int) -> None:
        if (transfer := self._of(id_, epoch)) is not None:
            self.act(id_, transfer.machine.fail(FailureReason.CANCELLED), now)

    def on_link_ready(self, now: float, generation: int) -> None:
        if generation == self.generation:
            self.is_linked = True
            self.issue_next(now)

    def on_link_lost(self, now: float, generation: int) -> None:
        if generation == self.generation:
            self.break_link(now)

    def on_reply(self, now: float, order: FetchOrder, verdict: FetchVerdict) -> None:
        if self.issuer.open_order != order:
            return
        self.issuer.settle(verdict)
        transfer = self._of(order.transfer_id, order.epoch)
        if verdict is FetchVerdict.GRANTED:
            self.operations.append(Operation(order, now))
            if transfer is not None:
                self.operations[-1].places = self.memory.places(
                    order.transfer_id, order.token_start, order.token_end
                )
        if transfer is not None:
            fetch = Fetch(order.token_start, order.token_end)
            self.act(order.transfer_id, transfer.machine.fetch_replied(fetch, verdict, now), now)
        self.issue_next(now)

    def arrive(self, operation: Operation, sent: list[tuple[int, int]], now: float) -> None:
        """The bytes are where the operation was told to put them, wanted or not."""
        order = operation.order
        if operation.places:
            self.memory.put(operation.places, sent)
        self.operation_ended(operation)
        transfer = self._of(order.transfer_id, order.epoch)
        if transfer is not None:
            fetch = Fetch(order.token_start, order.token_end)
            self.act(order.transfer_id, transfer.machine.arrived(fetch, b"", now), now)
        self.reserve_next(now)

    def operation_ended(self, operation: Operation) -> None:
        operation.is_done = True
        order = operation.order
        if operation.places and self._of(order.transfer_id, order.epoch) is None:
            self.memory.end_quarantine(operation.blocks)

    def break_link(self, now: float) -> None:
        for operation in self.operations:
            if not operation.is_done:
                self.operation_ended(operation)
        self.new_link()
        for id_ in list(self.transfers):
            self.act(id_, self.transfers[id_].machine.fail(FailureReason.LINK_BROKEN), now)

    def issue_next(self, now: float) -> None:
        if not self.is_linked or self.issuer.open_order is not None:
            return
        for id_, transfer in self.transfers.items():
            if transfer.waiting:
                fetch = transfer.waiting.pop(0)
                order = FetchOrder(
                    transfer_id=id_,
                    epoch=transfer.epoch,
                    decode_worker=self.worker,
                    generation=self.generation,
                    ticket=0,
                    token_start=fetch.token_start,
                    token_end=fetch.token_end,
                )
                self.issued_at = now
                self.send("prefill", "fetch", self.issuer.issue(order))
                return

    def ask_again(self) -> None:
        if self.issuer.open_order is not None:
            self.send("prefill", "fetch", self.issuer.open_order)
        elif not self.is_linked:
            self.send("prefill", "open_link", self.generation, self.worker)

    def tick(self, now: float) -> None:
        is_unanswered = self.issuer.open_order and now >= self.issued_at + OPERATION_S
        is_late = any(not e.is_done and now >= e.posted_at + OPERATION_S for e in self.operations)
        if is_unanswered or is_late:
            self.break_link(now)
        for id_ in list(self.transfers):
            if id_ in self.transfers:
                self.act(id_, self.transfers[id_].machine.tick(now), now)

    def act(self, id_: int, actions: list, now: float) -> None:
        for action in actions:
            transfer = self.transfers[id_]  # nothing comes after Finish or Fail
            if isinstance(action, Reserve):
                self.reserving.append(id_)
                self.reserve_next(now)
            elif isinstance(action, Fetch):
                transfer.waiting.append(action)
                self.issue_next(now)
            elif isinstance(action, Watch):
                self.send("prefill", "watch", id_, transfer.epoch, self.worker)
            else:
                self.finish(id_, action, now)

    def reserve_next(self, now: float) -> None:
        while self.reserving:
            id_ = self.reserving[0]
            transfer = self.transfers[id_]
            if not self.memory.allocate(id_, transfer.num_tokens):
                return
            self.reserving.pop(0)
            self.memory.write(id_, 0, true_tokens(id_, 0, transfer.num_cached))
            self.act(id_, transfer.machine.reserved(transfer.num_cached, now), now)

    def finish(self, id_: int, action: Finish | Fail, now: float) -> None:
        transfer = self.transfers.pop(id_)
        if isinstance(action, Finish):
            self.num_finished += 1
            choice = action.commit.choices[0]
            assert choice.token_id == id_
            if not choice.finish_reason:
                everything = self.memory.read(id_, 0, transfer.num_tokens)
                assert everything == true_tokens(id_, 0, transfer.num_tokens)
        if id_ in self.reserving:
            self.reserving.remove(id_)
        if id_ in self.memory.owners:
            key = (id_, transfer.epoch)
            under_way = [
                each
                for each in self.operations
                if not each.is_done and (each.order.transfer_id, each.order.epoch) == key
            ]
            self.memory.give_back(id_, [block for each in under_way for block in each.blocks])
        self.send("prefill", "release", id_, transfer.epoch)
        self.reserve_next(now)
        self.issue_next(now)

    def _of(self, id_: int, epoch: int) -> DecodeTransfer | None:
        transfer = self.transfers.get(id_)
        return transfer if transfer is not None and transfer.epoch == epoch else None
