"""Choices that share blocks, under every order of verbs: nobody's KV is overwritten or lost.

The KV is played by a table of token ids: computing a token writes it, a copy copies a block.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.block_hash import BlockHash
from engine.block_pool import BlockPool
from engine.request import Request, RequestStatus, take_tokens
from engine.scheduler import Scheduler
from tests.unit.engine.conftest import make_request

BLOCK_SIZE = 2
NUM_BLOCKS = 9
MAX_NUM_SEQS = 4

# Two letters, so that prompts share prefixes and hashes meet.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=7)


class ForkMachine(RuleBasedStateMachine):
    """Requests come, run, fork and go."""

    @initialize()
    def start(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS)
        self.scheduler = Scheduler(
            self.pool,
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_NUM_SEQS,
            hash_root=BlockHash(b"root"),
        )
        self.memory: list[list[int | None]] = [[None] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
        self.live: list[Request] = []
        self.num_made = 0

    def make(self, prompt: list[int], num_choices: int, **facts: int) -> Request:
        self.num_made += 1
        return make_request(f"r-{self.num_made}", prompt, num_choices=num_choices, **facts)

    def write(self, request: Request, start: int, end: int) -> None:
        for position in range(start, end):
            block_id = request.block_ids[position // BLOCK_SIZE]
            self.memory[block_id][position % BLOCK_SIZE] = request.token_ids[position]

    def go_on(self, request: Request, tokens: dict[int, int], num_ended: int) -> None:
        branches = take_tokens(request, tokens)
        if request.hand_over:
            self.scheduler.hold(request)
            return
        going_on = branches[num_ended:]
        if going_on == [request]:
            return
        self.live.remove(request)
        if not going_on:
            self.scheduler.remove(request)
            return
        for source, target in self.scheduler.fork(request, going_on):
            self.memory[target] = list(self.memory[source])
        self.live += going_on

    @rule(
        prompt=prompts,
        num_choices=st.integers(1, 3),
        hand_over=st.booleans(),
        priority=st.integers(0, 1),
    )
    def add(self, prompt: list[int], num_choices: int, hand_over: bool, priority: int) -> None:
        request = self.make(prompt, num_choices, hand_over=hand_over, priority=priority)
        self.scheduler.add(request)
        self.live.append(request)

    @rule(prompt=prompts, num_choices=st.integers(1, 3), priority=st.integers(0, 1))
    def reserve(self, prompt: list[int], num_choices: int, priority: int) -> None:
        request = self.make(prompt, num_choices, priority=priority)
        new_block_ids = self.scheduler.reserve(request)
        if new_block_ids is not None:
            self.wipe(new_block_ids)
            self.write(request, request.num_cached_tokens, request.num_tokens)
            self.live.append(request)

    def wipe(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.memory[block_id] = [None] * BLOCK_SIZE

    @precondition(lambda self: self.scheduler.queues.waiting_for_kv)
    @rule(data=st.data(), token_ids=st.lists(st.integers(0, 1), min_size=3, max_size=3))
    def activate(self, data: st.DataObject, token_ids: list[int]) -> None:
        request = data.draw(st.sampled_from(list(self.scheduler.queues.waiting_for_kv.values())))
        num_ended = data.draw(st.integers(0, request.num_choices))
        self.scheduler.activate(request)
        self.go_on(request, dict(zip(request.choices, token_ids, strict=False)), num_ended)

    @rule(budget=st.integers(1, 8), data=st.data())
    def step(self, budget: int, data: st.DataObject) -> None:
        schedule = self.scheduler.schedule(budget)
        self.wipe(schedule.block_ids_to_wipe(BLOCK_SIZE))
        assert sum(r.num_seqs for r in self.scheduler.queues.running) <= MAX_NUM_SEQS
        for entry in schedule.scheduled:
            self.write(entry.request, entry.start, entry.end)
        for entry in schedule.scheduled:
            samples, request = entry.samples, entry.request
            self.scheduler.update(entry)
            if not samples:
                continue
            tokens = {index: data.draw(st.integers(0, 1)) for index in request.choices}
            is_long = request.num_output_tokens > 3
            num_ended = data.draw(st.integers(0, request.num_choices))
            self.go_on(request, tokens, request.num_choices if is_long else num_ended)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        request = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.scheduler.remove(request)

    @invariant()
    def every_request_finds_its_own_kv(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        self.scheduler.check_integrity(self.live)
        for request in self.live:
            if request.status is RequestStatus.WAITING_FOR_KV:
                continue  # a peer still writes
            found = [
                self.memory[request.block_ids[position // BLOCK_SIZE]][position % BLOCK_SIZE]
                for position in range(request.num_computed_tokens)
            ]
            assert found == request.token_ids[: request.num_computed_tokens]

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for request in self.live:
            self.scheduler.remove(request)
        assert self.pool.num_available == NUM_BLOCKS, "a block has outlived its owners"


TestFork = ForkMachine.TestCase
TestFork.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
