"""Whatever comes in whatever order into a tiny pool: the books agree, and every request ends."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_hash import BlockHash
from engine.block_pool import BlockPool
from engine.request import Request, RequestStatus
from engine.scheduler import Scheduler
from tests.unit.engine.conftest import make_request

BLOCK_SIZE = 4
NUM_BLOCKS = 10
MAX_TOKENS = BLOCK_SIZE * NUM_BLOCKS
MAX_NUM_SEQS = 3
BUDGET = 8

LENGTHS = st.integers(1, MAX_TOKENS - 1)
PRIORITIES = st.sampled_from([0, 0, 0, 1, -1])


class SchedulerMachine(RuleBasedStateMachine):
    """Plays the engine and its clients; at the end it only steps, and counts the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.scheduler = Scheduler(
            self.pool,
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_NUM_SEQS,
            hash_root=BlockHash(b"root"),
        )
        self.requests: dict[str, Request] = {}
        self.unreserved: list[Request] = []  # ask again before every step
        self.num_made = 0

    def make(self, length: int, first: int, **changes: int) -> Request:
        self.num_made += 1
        prompt = [first * 100 + position for position in range(length)]
        max_tokens = changes.pop("max_tokens")
        return make_request(f"r{self.num_made}", prompt, max_tokens=max_tokens, **changes)

    # What clients and peers do

    @rule(
        length=LENGTHS,
        first=st.integers(0, 2),
        max_tokens=st.integers(1, MAX_TOKENS),
        priority=PRIORITIES,
        hand_over=st.sampled_from([False, False, False, True]),
    )
    def add(self, length: int, first: int, **changes: int) -> None:
        request = self.make(length, first, **changes)
        self.requests[request.request_id] = request
        self.scheduler.add(request)

    @rule(
        length=LENGTHS,
        first=st.integers(0, 2),
        max_tokens=st.integers(2, MAX_TOKENS),
        priority=PRIORITIES,
    )
    def reserve(self, length: int, first: int, **changes: int) -> None:
        self.unreserved.append(self.make(length, first, **changes))
        self.unreserved.sort(key=lambda request: request.priority)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        self.end(self.requests[request_id])

    @precondition(lambda self: self.scheduler.queues.waiting_for_kv)
    @rule(data=st.data())
    def activate(self, data: st.DataObject) -> None:
        waiting = self.scheduler.queues.waiting_for_kv
        request = waiting[data.draw(st.sampled_from(sorted(waiting)))]
        self.activate_one(request)

    @precondition(lambda self: self.scheduler.queues.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = self.scheduler.queues.held
        self.end(held[data.draw(st.sampled_from(sorted(held)))])

    # What the engine does

    @rule()
    def step(self) -> None:
        while self.unreserved and self.scheduler.reserve(self.unreserved[0]) is not None:
            request = self.unreserved.pop(0)
            self.requests[request.request_id] = request
        decoding = [
            request
            for request in self.scheduler.queues.running
            if request.num_tokens - request.num_computed_tokens == 1
        ]
        schedule = self.scheduler.schedule(BUDGET)
        running = self.scheduler.queues.running
        assert schedule.num_tokens <= BUDGET
        assert len({id(entry.request) for entry in schedule.scheduled}) == len(schedule.scheduled)
        assert all(entry.request in running for entry in schedule.scheduled)
        # A prompt never keeps a running request from its next token.
        ran = [entry.request for entry in schedule.scheduled]
        stalled = [each for each in decoding if each in running and each not in ran]
        assert not stalled or self.pool.num_available == 0
        for entry in schedule.scheduled:
            request = entry.request
            has_room = len(request.block_ids) * BLOCK_SIZE >= entry.end
            assert has_room, "a token without a place in a block"
            samples = entry.samples
            self.scheduler.update(entry)
            if samples:
                request.token_ids.append(99)
            if request.num_output_tokens and request.hand_over:
                self.scheduler.hold(request)
            else:
                self.end_if_full(request)

    def activate_one(self, request: Request) -> None:
        self.scheduler.activate(request)
        request.token_ids.append(7)
        self.end_if_full(request)

    def end_if_full(self, request: Request) -> None:
        if (
            request.num_output_tokens >= request.sampling_params.max_tokens
            or request.num_tokens >= MAX_TOKENS
        ):
            self.end(request)

    def end(self, request: Request) -> None:
        self.scheduler.remove(request)
        del self.requests[request.request_id]

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity()
        self.scheduler.check_integrity(self.requests.values())
        for request in self.requests.values():
            # Each needs another one that came or went.
            assert request.num_preemptions <= self.num_made
            if request.status is RequestStatus.RUNNING and not request.hand_over:
                assert request.num_tokens <= MAX_TOKENS

    def teardown(self) -> None:
        """Nothing new comes and no peer is slow: all is done after a bounded number of steps."""
        remaining = [*self.requests.values(), *self.unreserved]
        num_tokens = sum(
            min(MAX_TOKENS, request.num_prompt_tokens + request.sampling_params.max_tokens)
            for request in remaining
        )
        num_steps = 0
        while self.requests or self.unreserved:
            for request in list(self.scheduler.queues.waiting_for_kv.values()):
                self.activate_one(request)
            for request in list(self.scheduler.queues.held.values()):
                self.end(request)
            self.step()
            self.books_agree()
            num_steps += 1
            assert num_steps <= num_tokens + 2 * len(remaining), "no progress"
        counts = self.pool.counts()
        assert counts.free + counts.cached == NUM_BLOCKS


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)
TestSchedulerMachine = SchedulerMachine.TestCase


def test_two_giants_do_not_preempt_each_other_in_turn():
    machine = SchedulerMachine()
    giants = [machine.make(8, number, max_tokens=MAX_TOKENS) for number in (0, 1)]
    for giant in giants:
        machine.requests[giant.request_id] = giant
        machine.scheduler.add(giant)
    num_steps = 0
    while machine.requests:
        machine.step()
        num_steps += 1
        assert num_steps <= 2 * MAX_TOKENS
    assert [giant.num_preemptions for giant in giants] == [0, 1]
    assert [giant.num_tokens for giant in giants] == [MAX_TOKENS, MAX_TOKENS]
