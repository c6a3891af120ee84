"""What the policy sees of a worker: plain frozen data, one value per moment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.block_hash import BlockHash
from router.block_name import BlockScheme

PREFILL = "prefill"
DECODE = "decode"
NO_ROOT = BlockHash(b"")
NO_SLOT = 0  # of workers nobody tells the cache of
# Late binding: beyond two full batches on a worker, or what would fill a decode worker's KV twice,
# a request waits where it can still go anywhere.
MAX_BATCHES_AHEAD = 2
NEVER = -1
# These stand in where nothing was measured yet.
UNMEASURED_TOKENS_PER_S = 1000.0
UNMEASURED_STEP_S = 0.05
UNMEASURED_BYTES_PER_S = 100e6


class WorkerKey(NamedTuple):
    """One process: a place in a pool and who holds it. A restarted worker has another key."""

    worker_id: str
    incarnation: int


class LinkView(NamedTuple):
    """A ready KV link, seen from its decode worker."""

    bandwidth_bytes_per_s: float
    latency_s: float
    queued_bytes: int

    @property
    def byte_s(self) -> float:
        """Seconds a byte takes."""
        return 1.0 / (self.bandwidth_bytes_per_s or UNMEASURED_BYTES_PER_S)


class Pending(NamedTuple):
    """Own picks that the worker's last report cannot know yet."""

    num_requests: int = 0
    num_tokens: int = 0  # prompt tokens to be computed
    num_bytes: int = 0  # KV to arrive
    num_kv_tokens: int = 0  # that will need blocks


NOTHING_PENDING = Pending()


@dataclass(slots=True, kw_only=True)
class WorkerView:
    """One live worker: what it said in its Hello and in its last load, and what we sent since.

    Nobody changes one. It is not frozen because that doubles the time to make one, and every report
    and every pick makes one.

    A step costs `step_s` at the present batch, each prompt token in it 1 / `prefill_tokens_per_s`
    on top; a running request adds `request_s` to every step, and each token of its KV `kv_token_s`.
    """

    key: WorkerKey
    pool: str
    is_routable: bool = True  # serves, its state stream flows, nothing speaks against it
    has_refused: bool = False  # refused a request since its last load
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int
    hash_root: BlockHash = NO_ROOT
    num_kv_blocks: int
    kv_bytes_per_token: int
    num_running: int = 0
    num_waiting: int = 0
    num_transferring: int = 0
    num_promised_tokens: int = 0  # of hand-overs on their way that have no blocks yet
    num_waiting_uncached_tokens: int = 0
    num_free_blocks: int = 0  # free or cached: what a new request can take
    num_used_blocks: int = 0
    prefill_tokens_per_s: float = 0.0  # 0: not measured
    step_s: float = 0.0  # 0: not measured
    request_s: float = 0.0  # 0: not known
    kv_token_s: float = 0.0
    links: Mapping[WorkerKey, LinkView] = field(default_factory=dict)  # decode: its ready links
    pending: Pending = NOTHING_PENDING
    slot: int = field(default=NO_SLOT, compare=False)  # its place in its pool's index

    # Derived once, since each decision looks at every worker. First what it has to do.
    num_requests: int = field(init=False)  # it has or will have, as far as we know
    kv_tokens: int = field(init=False)  # in use, promised or waiting to be computed
    is_full: bool = field(init=False)
    is_open: bool = field(init=False)  # may be given a request now
    max_tokens: int = field(init=False)  # longest request that fits the empty worker, and one token
    open_tokens: int = field(init=False)  # the same while it is open, else less than any request
    pending_bytes: int = field(init=False)
    promised_tokens: int = field(init=False)  # that need blocks and have none, as far as we know
    num_prompts_ahead: int = field(init=False)  # that wait to be computed
    # Then what that costs a further request, or is cost by it.
    chunk_tokens: int = field(init=False)  # of a prompt in one step, at least 1
    fixed_s: float = field(init=False)  # of one step
    token_s: float = field(init=False)  # of one prompt token, with its share of a step
    queue_s: float = field(init=False)  # until a new request's prompt is computed
    streams_s: float = field(init=False)  # added to all streams by its step, without its KV
    kv_harm_s: float = field(init=False)  # and by each token of its KV
    prompt_harm_s: float = field(init=False)  # added to all requests by one prompt token more here
    company_s: float = field(init=False)  # what streams and KV here add to its step
    seq_step_s: float = field(init=False)  # to wait per step of it, for each request too many
    seq_wait_s: float = field(init=False)  # the same for all that are too many with it
    block_step_s: float = field(init=False)  # to wait per step of it, for each block too few

    def __post_init__(self) -> None:
        """Derive."""
        self._derive_load()
        self._derive_seconds()

    def _derive_load(self) -> None:
        num_requests, kv_tokens = self._count_requests(), self._count_kv_tokens()
        num_pool_tokens = self.num_kv_blocks * self.block_size
        # Prompts that wait on a prefill worker need no KV yet, and are answered for by their queue.
        is_kv_full = self.pool != PREFILL and kv_tokens >= MAX_BATCHES_AHEAD * num_pool_tokens
        is_crowded = num_requests >= MAX_BATCHES_AHEAD * max(self.max_num_seqs, 1)
        is_full = self.has_refused or is_crowded or is_kv_full
        is_open = self.is_routable and not is_full
        max_tokens = min(self.max_model_len, num_pool_tokens) - 1
        self.num_requests = num_requests
        self.kv_tokens = kv_tokens
        self.is_full = is_full
        self.is_open = is_open
        self.max_tokens = max_tokens
        self.open_tokens = max_tokens if is_open else NEVER
        self.pending_bytes = self.pending.num_bytes
        self.promised_tokens = self.num_promised_tokens + self.pending.num_kv_tokens
        self.num_prompts_ahead = self.num_waiting + self.pending.num_requests

    def _derive_seconds(self) -> None:
        fixed_s = self.step_s or UNMEASURED_STEP_S
        added_s = 1.0 / (self.prefill_tokens_per_s or UNMEASURED_TOKENS_PER_S)
        chunk_tokens = max(self.max_num_batched_tokens, 1)
        token_s = added_s + fixed_s / chunk_tokens
        num_requests, request_s, kv_token_s = self.num_requests, self.request_s, self.kv_token_s
        num_streams = min(num_requests, self.max_num_seqs)
        seq_step_s = fixed_s / max(self.max_num_seqs, 1)
        # One more row makes each step longer; unless known better, by what one prompt token takes.
        row_s = request_s if request_s or kv_token_s else added_s
        self.chunk_tokens = chunk_tokens
        self.fixed_s = fixed_s
        self.token_s = token_s
        self.queue_s = self.num_tokens_ahead * token_s
        self.streams_s = num_streams * row_s
        self.kv_harm_s = num_streams * kv_token_s
        self.prompt_harm_s = num_requests * added_s
        self.company_s = num_streams * request_s + self.kv_tokens * kv_token_s
        self.seq_step_s = seq_step_s
        self.seq_wait_s = max(num_requests + 1 - self.max_num_seqs, 0) * seq_step_s
        self.block_step_s = fixed_s / max(self.num_used_blocks, 1)

    def _count_requests(self) -> int:
        num_engine = self.num_running + self.num_waiting
        if self.pool == PREFILL:
            # A transfer is open from a prompt's admission until its KV is released.
            num_own = max(num_engine, self.num_transferring)
        else:
            num_own = num_engine + self.num_transferring
        return num_own + self.pending.num_requests

    def _count_kv_tokens(self) -> int:
        pending = self.pending.num_kv_tokens if self.pool == DECODE else self.pending.num_tokens
        num_coming = self.num_promised_tokens + self.num_waiting_uncached_tokens + pending
        return self.num_used_blocks * self.block_size + num_coming

    @property
    def num_tokens_ahead(self) -> int:
        """Prompt tokens to be computed before a new request's."""
        return self.num_waiting_uncached_tokens + self.pending.num_tokens

    @property
    def scheme(self) -> BlockScheme:
        """How it cuts and names its blocks."""
        return BlockScheme(self.block_size, self.hash_root)

    def could_hold(self, num_tokens: int, num_choices: int = 1) -> bool:
        """Whether it holds this many tokens, and one more of each choice, when it is empty."""
        if num_choices == 1 or self.pool == PREFILL:
            return num_tokens <= self.max_tokens
        num_blocks = num_tokens // self.block_size + num_choices
        has_room = num_blocks <= self.num_kv_blocks and num_choices <= self.max_num_seqs
        return num_tokens <= self.max_tokens and has_room
