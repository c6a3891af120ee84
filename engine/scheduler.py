"""Which requests run how many tokens in the next step.

There are no phases: a request is scheduled while `num_computed_tokens` has not caught up with
`num_tokens`, and samples when it has. Prefill, chunked prefill, decode and recomputation after a
preemption are all that.

    waiting   -> running    all blocks of its tokens are taken at once, its cached prefix first
    activated -> running    its blocks are there already (the KV came from a peer)
    running, activated -> waiting   preempted: its blocks are given up
    running   -> held       a hand-over has sampled its tokens; blocks stay until released

A request of several choices is one entry until its prompt is computed and takes their places among
the running from the start; then it forks, and each choice is scheduled, preempted and ended alone.

Rank, which is priority and then arrival, orders everything. A request is preempted, the last in
rank first, for the next token of one before it, or for the place and the prompt of one with a
strictly better priority. So the first in rank always gets on, and equals do not push each other
out in turn.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from engine.block_hash import BlockHash
from engine.block_pool import BlockPool
from engine.chunk_shares import ChunkShares
from engine.request import Request, RequestStatus
from engine.request_blocks import BlockDemand, RequestBlocks
from engine.request_queues import RequestQueues
from engine.schedule import Schedule, ScheduledRequest


class Scheduler:
    """Gives requests their turns and their blocks. Invariant: who owns blocks is in a queue."""

    def __init__(
        self, pool: BlockPool, *, block_size: int, max_num_seqs: int, hash_root: BlockHash
    ) -> None:
        self._pool = pool
        self._blocks = RequestBlocks(pool, block_size=block_size, hash_root=hash_root)
        self._block_size = block_size
        self._unreserved: Request | None = None  # found no room since the last step, asks again
        self.queues = RequestQueues(max_num_seqs=max_num_seqs)
        self.num_preemptions = 0

    # Ways in

    def add(self, request: Request) -> None:
        """Queue a request whose tokens are to be computed here."""
        self.queues.arrive(request)
        self.queues.wait(request, RequestStatus.WAITING)

    def reserve(self, request: Request) -> list[int] | None:
        """Take blocks for a request whose KV a peer sends; the new ones, or None without room.

        One that asks again keeps its rank, and no prompt behind it takes what it waits for.
        """
        self.queues.arrive(request)
        self._unreserved = request
        if self._is_behind_starved_head(request):
            return None
        demand = BlockDemand(request.num_tokens + 1, request.num_tokens)
        self._preempt_for(request, demand=demand)
        new_block_ids = self._allocate(request, demand)
        if new_block_ids is None:
            return None
        self._unreserved = None
        self.queues.wait_for_kv(request)
        return new_block_ids

    def activate(self, request: Request) -> None:
        """All KV of a reserved request has arrived; the caller adds its next token, or forks it."""
        request.num_computed_tokens = request.num_tokens
        self._blocks.store_arrived(request)
        self.queues.activate(request)

    # The two verbs

    def schedule(self, token_budget: int, *, max_chunk_tokens: int | None = None) -> Schedule:
        """Share out a step: next tokens of running requests first, then pieces of prompts."""
        schedule = Schedule()
        num_preemptions = self.num_preemptions
        self._admit_activated()
        self._admit_urgent(schedule)
        self._schedule_decodes(schedule)
        budget = token_budget - len(schedule.scheduled)
        if max_chunk_tokens is not None:
            budget = min(budget, max_chunk_tokens)
        chunks = self._schedule_chunks(schedule, ChunkShares(budget))
        # Stable: a piece of one token runs with the decodes.
        schedule.scheduled = sorted(
            schedule.scheduled + chunks, key=lambda entry: entry.num_tokens > 1
        )
        schedule.num_preemptions = self.num_preemptions - num_preemptions
        self._unreserved = None
        return schedule

    def update(self, entry: ScheduledRequest) -> None:
        """Apply one request's share of a step; the token it sampled is the caller's to add."""
        entry.request.num_computed_tokens = entry.end
        self._blocks.store_computed(entry.request)

    def fork(self, request: Request, branches: Sequence[Request]) -> list[tuple[int, int]]:
        """Put its choices in the place of a computed request; blocks to copy, from and to."""
        copies = self._blocks.fork(request, branches)
        self.queues.fork(request, branches)
        return copies

    # Ways out

    def hold(self, request: Request) -> None:
        """A hand-over has its tokens: keep the blocks for the peer, leave the running set."""
        self._pool.hold(request.block_ids)
        self.queues.hold(request)

    def remove(self, request: Request, *, is_poisoned: bool = False) -> None:
        """End a request wherever it is and give up its blocks."""
        if is_poisoned:
            self._pool.forget(request.block_ids)
        if request.request_id in self.queues.held:
            self._pool.release(request.block_ids)
            request.block_ids = []
        self.queues.leave(request)
        self._blocks.free(request)
        request.status = RequestStatus.FINISHED

    # Numbers

    def num_uncached_tokens(self) -> int:
        """Tokens of known prompts that nobody has computed yet."""
        num_tokens = sum(r.num_tokens - r.num_computed_tokens - 1 for r in self.queues.running)
        for request in self.queues.waiting:
            num_tokens += request.num_tokens - self._blocks.num_cached_tokens(request)
        return num_tokens

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """AssertionError when a request is not in exactly one queue, or owns what it should not."""
        requests = list(requests)
        self.queues.check_integrity(requests)
        owned = {block_id for request in requests for block_id in request.owned_block_ids}
        assert len(owned) == self._pool.num_owned(), "a block has lost its owner"

    # Admission to the running set

    def _admit_activated(self) -> None:
        while self.queues.activated:
            request = self.queues.activated[0]
            self._preempt_for(request, needs_place=True)
            if not self.queues.has_place_for(request) or self._is_place_of_head(request):
                return
            self.queues.run(request)

    def _admit_urgent(self, schedule: Schedule) -> None:
        """Let what is of a worse priority make way, before it is given tokens."""
        waiting = self.queues.waiting
        while waiting and self.queues.preemptable_for(waiting[0]):
            head = waiting[0]
            if not self._is_behind_unreserved(head):
                self._preempt_for(head, demand=self._demand(head), needs_place=True)
            if self._admit_next(schedule) is None:
                return

    def _admit_next(self, schedule: Schedule) -> Request | None:
        """Move the head of the queue to the running set when there is room for all of it."""
        if not self.queues.waiting or not self.queues.has_place_for(self.queues.waiting[0]):
            return None
        request = self.queues.waiting[0]
        if self._is_behind_unreserved(request):
            return None
        new_block_ids = self._allocate(request, self._demand(request))
        if new_block_ids is None:
            return None
        schedule.new_block_ids += new_block_ids
        self.queues.run(request)
        return request

    def _demand(self, request: Request) -> BlockDemand:
        # The last token is always computed: its logits are what a step is for.
        max_cached_tokens = 0 if request.wants_prompt_logprobs else request.num_tokens - 1
        return BlockDemand(request.num_tokens, max_cached_tokens)

    def _allocate(self, request: Request, demand: BlockDemand) -> list[int] | None:
        if self._num_lacking(request, demand) > 0:
            return None
        return self._blocks.allocate(request, demand)

    def _num_lacking(self, request: Request, demand: BlockDemand) -> int:
        # With room for all that run to grow once: a newcomer that took the last blocks would be
        # preempted at once.
        num_taken = self._blocks.num_taken(request, demand)
        return num_taken + self.queues.num_growing - self._pool.num_available

    def _is_behind_starved_head(self, request: Request) -> bool:
        """Whether the head of the queue comes before `request` and waits for blocks alone."""
        waiting = self.queues.waiting
        if not waiting or waiting[0].rank > request.rank:
            return False
        if not self.queues.has_place_for(waiting[0]):
            return False
        return self._num_lacking(waiting[0], self._demand(waiting[0])) > 0

    def _is_place_of_head(self, request: Request) -> bool:
        """Whether what `request` would take is for the head of the queue, which comes before it."""
        waiting = self.queues.waiting
        if not waiting or waiting[0].rank > request.rank:
            return False
        if self.queues.num_places - request.num_seqs >= waiting[0].num_seqs:
            return False
        return self._num_lacking(waiting[0], self._demand(waiting[0])) <= 0

    def _is_behind_unreserved(self, request: Request) -> bool:
        return self._unreserved is not None and self._unreserved.rank < request.rank

    # Shares of a step

    def _schedule_decodes(self, schedule: Schedule) -> None:
        for request in list(self.queues.running):
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for one before it
            if request.num_tokens - request.num_computed_tokens != 1:
                continue
            if not self._grow(schedule, request):
                continue
            schedule.scheduled.append(
                ScheduledRequest(
                    request=request, start=request.num_computed_tokens, end=request.num_tokens
                )
            )

    def _schedule_chunks(self, schedule: Schedule, shares: ChunkShares) -> list[ScheduledRequest]:
        """Pieces of prompts in order of rank, those of newcomers too."""
        prompts = deque(r for r in self.queues.running if r.num_tokens - r.num_computed_tokens > 1)
        while not shares.is_spent:
            head = self.queues.waiting[0] if self.queues.waiting else None
            if head is not None and not (prompts and prompts[0].rank < head.rank):
                num_tokens = head.num_tokens - self._blocks.num_cached_tokens(head)
                if shares.admits(head, num_tokens) and self._admit_next(schedule) is not None:
                    shares.give(head)
                    continue
            if not prompts:
                break
            request = prompts.popleft()
            if shares.admits(request, request.num_tokens - request.num_computed_tokens):
                shares.give(request)
        return shares.close()

    # Preemption

    def _grow(self, schedule: Schedule, request: Request) -> bool:
        """Make sure there is a block for the next token, preempting what comes later if need be."""
        if request.num_tokens <= len(request.block_ids) * self._block_size:
            return True
        while self._pool.num_available == 0:
            victim = self.queues.last_preemptable()
            if victim is None:
                return False
            self._preempt(victim)
            if victim is request:
                return False
        block_ids = self._pool.allocate(1)
        request.block_ids += block_ids
        schedule.new_block_ids += block_ids
        return True

    def _preempt_for(
        self, request: Request, *, demand: BlockDemand | None = None, needs_place: bool = False
    ) -> None:
        """Let requests of a worse priority make way for one, as long as that can be enough."""
        victims = self.queues.preemptable_for(request)
        # With each goes the block it might have wanted next.
        yielded = {block_id for victim in victims for block_id in victim.owned_block_ids}
        num_yielded = len(yielded) + sum(victim.num_seqs for victim in victims)
        if demand is not None and self._num_lacking(request, demand) > num_yielded:
            return
        if needs_place and not self._make_place(request, victims):
            return
        for victim in victims:
            if demand is None or self._num_lacking(request, demand) <= 0:
                return
            self._preempt(victim)

    def _make_place(self, request: Request, victims: list[Request]) -> bool:
        """Let running ones go until all choices of `request` have a place, if that can be."""
        running = [each for each in victims if each.status is RequestStatus.RUNNING]
        if self.queues.num_places + sum(each.num_seqs for each in running) < request.num_seqs:
            return False
        while not self.queues.has_place_for(request):
            victim = running.pop(0)
            self._preempt(victim)
            victims.remove(victim)
        return True

    def _preempt(self, request: Request) -> None:
        self.queues.leave(request)
        self._blocks.free(request)
        request.num_computed_tokens = 0
        request.num_stored_blocks = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.queues.wait(request, RequestStatus.PREEMPTED)
