"""What the policy sees of a worker: plain frozen data, one value per moment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.block_hash import BlockHash

PREFILL = "prefill"
DECODE = "decode"
NO_ROOT = BlockHash(b"")


class WorkerKey(NamedTuple):
    """One process: a place in a pool and who holds it. A restarted worker has another key."""

    worker_id: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkView:
    """A ready KV link, seen from its decode worker."""

    bandwidth_bytes_per_s: float
    latency_s: float
    queued_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """Own picks that the worker's last report cannot know yet."""

    num_requests: int = 0
    num_tokens: int = 0  # prompt tokens to be computed
    num_bytes: int = 0  # KV to arrive


NOTHING_PENDING = Pending()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One live worker: what it said in its Hello and in its last load, and what we sent since."""

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
    num_waiting_uncached_tokens: int = 0
    num_free_blocks: int = 0  # free or cached: what a new request can take
    num_used_blocks: int = 0
    prefill_tokens_per_s: float = 0.0  # 0: not measured
    step_s: float = 0.0
    links: Mapping[WorkerKey, LinkView] = field(default_factory=dict)  # decode: its ready links
    pending: Pending = NOTHING_PENDING

    @property
    def num_requests(self) -> int:
        """Requests this worker has or will have, as far as we know."""
        num_engine = self.num_running + self.num_waiting
        if self.pool == PREFILL:
            # A transfer is open from a prompt's admission until its KV is released.
            num_own = max(num_engine, self.num_transferring)
        else:
            num_own = num_engine + self.num_transferring
        return num_own + self.pending.num_requests

    @property
    def num_tokens_ahead(self) -> int:
        """Prompt tokens to be computed before a new request's."""
        return self.num_waiting_uncached_tokens + self.pending.num_tokens

    def could_hold(self, num_tokens: int) -> bool:
        """Whether a request of this many tokens, and one more, fits the empty worker."""
        num_blocks = -(-(num_tokens + 1) // self.block_size)
        return num_tokens < self.max_model_len and num_blocks <= self.num_kv_blocks
