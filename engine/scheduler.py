"""Which requests run how many tokens in the next step.

There are no phases: a request is scheduled while `num_computed_tokens` has not caught up with
`num_tokens`, and samples when it has. Prefill, chunked prefill, decode and recomputation after a
preemption are all that.

    waiting   -> running    all blocks of its tokens are taken at once, its cached prefix first
    activated -> running    its blocks are there already (the KV came from a peer)
    running   -> waiting    preempted: a step found no block for an earlier request's next token
    running   -> held       a hand-over has sampled its token; blocks stay until released
"""

from bisect import insort
from collections.abc import Iterable

from engine.block_hash import BlockHash
from engine.block_pool import BlockPool
from engine.request import Request, RequestStatus
from engine.request_blocks import RequestBlocks
from engine.schedule import Schedule, ScheduledRequest

# Rows of logits of prompts in one step: each is as long as the vocabulary.
_MAX_PROMPT_LOGITS = 256


def _arrival(request: Request) -> int:
    return request.arrival


class Scheduler:
    """Owns the queues and gives blocks to requests. Invariant: each queue is in arrival order."""

    def __init__(
        self, pool: BlockPool, *, block_size: int, max_num_seqs: int, hash_root: BlockHash
    ) -> None:
        self._pool = pool
        self._blocks = RequestBlocks(pool, block_size=block_size, hash_root=hash_root)
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._num_arrived = 0
        self._num_prompt_logits = 0  # rows of logits that this step needs beside those it samples
        self.num_preemptions = 0
        self.running: list[Request] = []
        self.waiting: list[Request] = []  # WAITING and PREEMPTED, without blocks
        self.activated: list[Request] = []  # WAITING, with blocks and KV
        self.waiting_for_kv: dict[str, Request] = {}
        self.held: dict[str, Request] = {}

    # Ways in

    def add(self, request: Request) -> None:
        """Queue a request whose tokens are to be computed here."""
        self._arrive(request)
        request.status = RequestStatus.WAITING
        self.waiting.append(request)

    def reserve(self, request: Request) -> list[int] | None:
        """Take blocks for a request whose KV a peer sends; the new ones, or None without room."""
        if self._is_head_starved():
            return None
        new_block_ids = self._blocks.allocate(
            request,
            request.num_tokens + 1,
            max_cached_tokens=request.num_tokens,
            margin=self._num_growing(),
        )
        if new_block_ids is None:
            return None
        self._arrive(request)
        request.status = RequestStatus.WAITING_FOR_KV
        self.waiting_for_kv[request.request_id] = request
        return new_block_ids

    def activate(self, request: Request, token_id: int) -> None:
        """All KV of a reserved request has arrived, and its next token with it."""
        del self.waiting_for_kv[request.request_id]
        request.num_computed_tokens = request.num_tokens
        request.token_ids.append(token_id)
        self._blocks.store_computed(request)
        request.status = RequestStatus.WAITING
        insort(self.activated, request, key=_arrival)

    # The two verbs

    def schedule(self, token_budget: int, *, max_chunk_tokens: int | None = None) -> Schedule:
        """Share out a step: next tokens of running requests first, then pieces of prompts."""
        schedule = Schedule()
        self._num_prompt_logits = 0
        self._admit_activated()
        self._schedule_decodes(schedule)
        budget = token_budget - len(schedule.scheduled)
        if max_chunk_tokens is not None:
            budget = min(budget, max_chunk_tokens)
        chunks: list[ScheduledRequest] = []
        for request in self.running:
            if request.num_tokens - request.num_computed_tokens > 1:
                budget -= self._schedule_chunk(chunks, request, budget)
        while budget > 0:
            newcomer = self._admit_next(schedule)
            if newcomer is None:
                break
            budget -= self._schedule_chunk(chunks, newcomer, budget)
        # Stable: a piece of one token runs with the decodes.
        schedule.scheduled = sorted(
            schedule.scheduled + chunks, key=lambda entry: entry.num_tokens > 1
        )
        return schedule

    def update(self, entry: ScheduledRequest, token_id: int | None) -> None:
        """Apply one request's result; `token_id` when it sampled."""
        request = entry.request
        request.num_computed_tokens = entry.end
        self._blocks.store_computed(request)
        if token_id is not None:
            request.token_ids.append(token_id)

    # Ways out

    def hold(self, request: Request) -> None:
        """A hand-over has its token: keep the blocks for the peer, leave the running set."""
        self.running.remove(request)
        self._pool.hold(request.block_ids)
        self.held[request.request_id] = request
        request.status = RequestStatus.FINISHED

    def remove(self, request: Request, *, is_poisoned: bool = False) -> None:
        """End a request wherever it is and give up its blocks."""
        if is_poisoned:
            self._pool.forget(request.block_ids)
        if self.held.pop(request.request_id, None) is not None:
            self._pool.release(request.block_ids)
        else:
            self._leave_queues(request)
            self._pool.free(request.block_ids)
        request.block_ids = []
        request.status = RequestStatus.FINISHED

    # Numbers

    def num_uncached_tokens(self) -> int:
        """Tokens of known prompts that nobody has computed yet."""
        num_tokens = sum(r.num_tokens - r.num_computed_tokens - 1 for r in self.running)
        for request in self.waiting:
            num_tokens += request.num_tokens - self._blocks.num_cached_tokens(request)
        return num_tokens

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """AssertionError when a request is not in exactly one queue, or owns what it should not."""
        queues = (self.running, self.waiting, self.activated)
        queued = [r for queue in queues for r in queue]
        queued += [*self.waiting_for_kv.values(), *self.held.values()]
        assert sorted(map(id, queued)) == sorted(map(id, requests)), "a request is lost or doubled"
        for queue in queues:
            assert queue == sorted(queue, key=_arrival), "a queue is out of order"
        assert not any(request.block_ids for request in self.waiting)
        owned = {block_id for request in queued for block_id in request.block_ids}
        counts = self._pool.counts()
        assert len(owned) == counts.used + counts.held, "a block has lost its owner"

    def _arrive(self, request: Request) -> None:
        self._num_arrived += 1
        request.arrival = self._num_arrived

    def _admit_activated(self) -> None:
        while self.activated and len(self.running) < self._max_num_seqs:
            request = self.activated.pop(0)
            request.status = RequestStatus.RUNNING
            insort(self.running, request, key=_arrival)

    def _schedule_decodes(self, schedule: Schedule) -> None:
        for request in list(self.running):
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

    def _grow(self, schedule: Schedule, request: Request) -> bool:
        """Make sure there is a block for the next token, preempting later arrivals if need be."""
        if request.num_tokens <= len(request.block_ids) * self._block_size:
            return True
        while self._pool.num_available == 0:
            victim = next((r for r in reversed(self.running) if not r.hand_over), None)
            if victim is None:
                return False
            self._preempt(victim)
            schedule.num_preemptions += 1
            if victim is request:
                return False
        block_ids = self._pool.allocate(1)
        request.block_ids += block_ids
        schedule.new_block_ids += block_ids
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._pool.free(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = 0
        request.num_stored_blocks = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        insort(self.waiting, request, key=_arrival)

    def _schedule_chunk(self, chunks: list[ScheduledRequest], request: Request, budget: int) -> int:
        start = request.num_computed_tokens
        if request.wants_prompt_logprobs:
            budget = min(budget, _MAX_PROMPT_LOGITS - self._num_prompt_logits)
        end = min(request.num_tokens, start + budget)
        if request.wants_prompt_logprobs:
            self._num_prompt_logits += end - start
        if end > start:
            chunks.append(ScheduledRequest(request=request, start=start, end=end))
        return end - start

    def _admit_next(self, schedule: Schedule) -> Request | None:
        """Move the head of the queue to the running set when there is room for all of it."""
        if not self.waiting or len(self.running) >= self._max_num_seqs:
            return None
        request = self.waiting[0]
        # The last token is always computed: its logits are what a step is for.
        new_block_ids = self._blocks.allocate(
            request,
            request.num_tokens,
            max_cached_tokens=0 if request.wants_prompt_logprobs else request.num_tokens - 1,
            margin=self._num_growing(),
        )
        if new_block_ids is None:
            return None
        schedule.new_block_ids += new_block_ids
        self.waiting.pop(0)
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=_arrival)
        return request

    def _num_growing(self) -> int:
        """Running requests that may soon want one more block each.

        A newcomer that took the last ones would be preempted at once.
        """
        return sum(not request.hand_over for request in self.running)

    def _is_head_starved(self) -> bool:
        """Whether the head of the queue waits for blocks, not for a place."""
        if not self.waiting or len(self.running) >= self._max_num_seqs:
            return False
        num_blocks = self._blocks.num_needed(self.waiting[0].num_tokens)
        return num_blocks + self._num_growing() > self._pool.num_available

    def _leave_queues(self, request: Request) -> None:
        if self.waiting_for_kv.pop(request.request_id, None) is not None:
            return
        for queue in (self.running, self.waiting, self.activated):
            if request in queue:
                queue.remove(request)
                return
