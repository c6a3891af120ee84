"""One simulated engine: the order of work of the real one (docs/adr/0013), without a model.

Every step: a token for each running request, then pieces of prompts. The first prompt that cannot
be finished gets at least half of what is left, the other half is for short ones behind it. What a
request will need is taken when it starts, so nobody is preempted. The speeds that the worker
reports are learnt from its steps by the real engine's code.

Steps in which nothing but decoding happens are simulated as one stretch, up to the next end of a
request. Whatever comes meanwhile cuts the stretch at the end of the step that runs.
"""

from collections import deque
from collections.abc import Callable

from engine.rates import Rates
from sim.agenda import Agenda
from sim.block_cache import BlockCache
from sim.chunk_shares import ChunkShares
from sim.decode_batch import DecodeBatch, Stretch
from sim.hardware import Hardware
from sim.job import Job

STEP_LIMIT_S = 1.0  # the real engine's
WARM_UP_TOKENS = 256


class SimEngine:
    """Owns the jobs and blocks of one worker.

    Invariants: a job is in one of waiting, computing, arrived, running or over; it has blocks in
    all but the first and the last.
    """

    def __init__(
        self,
        hardware: Hardware,
        agenda: Agenda,
        *,
        block_size: int,
        on_change: Callable[[], None],  # the load or the cache is another one
    ) -> None:
        self.hardware = hardware
        self.block_size = block_size
        self.cache = BlockCache(max(hardware.num_kv_tokens // block_size, 1))
        self.rates = Rates(now=agenda.now)
        self.is_alive = True
        self.waiting: deque[Job] = deque()  # their prompts are to be computed here
        self.computing: list[Job] = []
        self.arrived: deque[Job] = deque()  # their KV came from a peer
        self.running = DecodeBatch(hardware)
        self.num_uncached_waiting = 0  # tokens of `waiting`
        self.busy_s = 0.0
        self.num_computed_tokens = 0
        self.num_generated_tokens = 0
        self._agenda = agenda
        self._on_change = on_change
        self._unreserved: deque[tuple[Job, Callable[[], None]]] = deque()
        self._is_stepping = False
        self._stretch: Stretch | None = None  # that runs, with nothing beside it
        self._warm_up()

    def _warm_up(self) -> None:
        for num_decodes, num_tokens in ((1, 0), (0, WARM_UP_TOKENS)):
            duration_s = self.hardware.step_s(
                num_decodes=num_decodes,
                num_kv_tokens=num_decodes,
                num_chunk_tokens=num_tokens,
                num_pairs=num_tokens * num_tokens // 2,
            )
            self._observe(num_decodes, num_tokens, duration_s, num_decodes)

    # Numbers.

    @property
    def num_uncached_tokens(self) -> int:
        """Prompt tokens yet to be computed."""
        return self.num_uncached_waiting + sum(job.num_left for job in self.computing)

    @property
    def num_seqs(self) -> int:
        """Places taken."""
        return len(self.running) + len(self.computing)

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing of any request."""
        queues = (self.waiting, self.computing, self.arrived, self._unreserved)
        return not any(queues) and not len(self.running) and not self.cache.num_used

    # Ways in and out.

    def add(self, job: Job) -> None:
        """Compute a prompt here."""
        num_here = self.cache.num_leading(job.names) * self.block_size
        job.num_cached = min(num_here, job.num_prompt_tokens - 1)
        self.waiting.append(job)
        self.num_uncached_waiting += job.num_prompt_tokens - job.num_cached
        self._go_on()

    def reserve(self, job: Job, then: Callable[[], None]) -> None:
        """Take blocks for a job whose KV a peer sends, as soon as there is room."""
        self._unreserved.append((job, then))
        self._reserve_next()

    def activate(self, job: Job) -> None:
        """All its KV is here: it may decode."""
        self.cache.store(job.lease, job.names)
        job.num_computed = job.num_prompt_tokens
        self.arrived.append(job)
        self._go_on()

    def release(self, job: Job) -> None:
        """Give up what was kept after the end."""
        self.cache.free(job.lease)
        self._go_on()

    def cancel(self, job: Job) -> None:
        """Forget a job wherever it is."""
        if job.is_over and not job.is_kept:
            return
        if job in self.waiting:
            self.waiting.remove(job)
            self.num_uncached_waiting -= job.num_prompt_tokens - job.num_cached
        elif job in self.computing:
            self.computing.remove(job)
        elif job in self.arrived:
            self.arrived.remove(job)
        elif job.started_at_step and not job.is_over:
            self.running.remove(job)
        job.is_over = True
        self._unreserved = deque(entry for entry in self._unreserved if entry[0] is not job)
        self.cache.free(job.lease)
        self._go_on()

    # Steps.

    def _go_on(self) -> None:
        self._reserve_next()
        self._on_change()
        if not self.is_alive:
            return
        if not self._is_stepping:
            self._start_step()
        elif self._stretch is not None and (self.waiting or self.arrived):
            self._cut_stretch(self._stretch)

    def _reserve_next(self) -> None:
        while self._unreserved:
            job, then = self._unreserved[0]
            if not self._take_blocks(job):
                return
            self._unreserved.popleft()
            then()

    def _start_step(self) -> None:
        self._admit_arrived()
        if self.computing or self.waiting:
            budget = self._chunk_budget(len(self.running))
            if chunks := self._share_chunks(budget):
                self._start_mixed_step(chunks)
                return
        if len(self.running):
            self._start_stretch()

    def _start_mixed_step(self, chunks: list[tuple[Job, int]]) -> None:
        num_decodes, num_kv_tokens = len(self.running), self.running.num_kv_tokens
        num_tokens = sum(num for _, num in chunks)
        duration_s = self.hardware.step_s(
            num_decodes=num_decodes,
            num_kv_tokens=num_kv_tokens,
            num_chunk_tokens=num_tokens,
            num_pairs=sum(job.num_pairs(num) for job, num in chunks),
        )
        self._observe(num_decodes, num_tokens, duration_s, num_kv_tokens)
        self._is_stepping = True
        self._agenda.after(duration_s, lambda: self._end_mixed_step(num_decodes, chunks))

    def _start_stretch(self) -> None:
        stretch = self._stretch = self.running.next_stretch(self._agenda.now_s)
        self._is_stepping = True
        self._agenda.at(stretch.end_s, lambda: self._end_stretch(stretch))

    def _cut_stretch(self, stretch: Stretch) -> None:
        self._stretch = None
        cut = stretch.cut(self._agenda.now_s)
        self._agenda.at(cut.end_s, lambda: self._end_stretch(cut))
        stretch.is_cut = True

    def _end_stretch(self, stretch: Stretch) -> None:
        if stretch.is_cut or not self.is_alive:
            return
        self._stretch = None
        step_s = (stretch.end_s - stretch.start_s) / stretch.num_steps
        self._observe(len(self.running), 0, step_s, self.running.num_kv_tokens)
        self.busy_s += step_s * (stretch.num_steps - 1)
        self._step_decodes(stretch.num_steps)
        self._is_stepping = False
        self._go_on()

    def _observe(
        self, num_decodes: int, num_chunk_tokens: int, duration_s: float, num_kv_tokens: int
    ) -> None:
        self.busy_s += duration_s
        self.rates.observe(
            num_decodes=num_decodes,
            num_chunk_tokens=num_chunk_tokens,
            duration_s=duration_s,
            num_kv_tokens=num_kv_tokens,
        )

    def _chunk_budget(self, num_decodes: int) -> int:
        budget = self.hardware.max_num_batched_tokens - num_decodes
        limit = self.rates.max_chunk_tokens(num_decodes=num_decodes, limit_s=STEP_LIMIT_S)
        return budget if limit is None else min(budget, limit)

    def _admit_arrived(self) -> None:
        while self.arrived and self.num_seqs < self.hardware.max_num_seqs:
            self.running.add(self.arrived.popleft())

    def _share_chunks(self, budget: int) -> list[tuple[Job, int]]:
        shares = ChunkShares(budget)
        for job in self.computing:
            shares.give(job)
        while self._can_admit(shares) and (newcomer := self._admit_waiting()) is not None:
            shares.give(newcomer)
        return shares.close()

    def _can_admit(self, shares: ChunkShares) -> bool:
        if not self.waiting or self._unreserved or self.num_seqs >= self.hardware.max_num_seqs:
            return False
        head = self.waiting[0]
        return shares.admits(head.num_prompt_tokens - head.num_cached)

    def _admit_waiting(self) -> Job | None:
        """Start the first that waits; None: there are not enough blocks."""
        job = self.waiting[0]
        num_guessed = job.num_cached
        if not self._take_blocks(job):
            return None
        self.waiting.popleft()
        self.num_uncached_waiting -= job.num_prompt_tokens - num_guessed
        job.num_computed = job.num_cached
        self.computing.append(job)
        return job

    def _take_blocks(self, job: Job) -> bool:
        num_tokens = job.num_prompt_tokens + job.num_output_tokens
        lease = self.cache.take(job.names, -(-num_tokens // self.block_size))
        if lease is None:
            return False
        job.lease = lease
        # The last token is always computed: its logits are what a step is for.
        num_here = len(lease.names) * self.block_size
        job.num_cached = min(num_here, job.num_prompt_tokens - 1)
        return True

    def _end_mixed_step(self, num_decodes: int, chunks: list[tuple[Job, int]]) -> None:
        if not self.is_alive:
            return
        if num_decodes:
            self._step_decodes(1)
        for job, num_tokens in chunks:
            if not job.is_over:
                self._end_chunk(job, num_tokens)
        # Only now: whoever is told of an end may cancel or release something at once.
        self._is_stepping = False
        self._go_on()

    def _step_decodes(self, num_steps: int) -> None:
        self.num_generated_tokens += num_steps * len(self.running)
        for job in self.running.step(num_steps):
            self._end(job)

    def _end_chunk(self, job: Job, num_tokens: int) -> None:
        before = job.num_computed // self.block_size
        job.num_computed += num_tokens
        assert job.num_left >= 0, "a piece was computed twice"
        self.num_computed_tokens += num_tokens
        self.cache.store(job.lease, job.names[before : job.num_computed // self.block_size])
        job.on_chunk(job)
        if job.num_left:
            return
        self.computing.remove(job)
        job.num_generated = 1
        self.num_generated_tokens += 1
        job.on_token(job)
        if job.num_output_tokens > 1:
            self.running.add(job)
        else:
            self._end(job)

    def _end(self, job: Job) -> None:
        job.is_over = True
        if not job.is_kept:
            self.cache.free(job.lease)
        job.on_end(job)

    def check_integrity(self) -> None:
        """Assert that counts and queues agree."""
        self.cache.check_integrity()
        self.running.check_integrity()
        assert self.num_uncached_waiting == sum(
            job.num_prompt_tokens - job.num_cached for job in self.waiting
        )
