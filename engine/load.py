"""What the engine says about itself: plain numbers, for the worker to export."""

from dataclasses import dataclass, field

from engine.block_hash import BlockHash
from engine.request import RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """Blocks by state; each block counts once and together they are `total`."""

    free: int
    cached: int
    used: int
    held: int
    quarantined: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEvents:
    """Changes of the prefix map since the last look: cleared, then removed, then stored."""

    removed: tuple[BlockHash, ...] = ()
    stored: tuple[BlockHash, ...] = ()
    cleared: bool = False

    def __bool__(self) -> bool:
        return bool(self.removed or self.stored or self.cleared)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy one engine is."""

    num_running: int
    num_waiting: int  # WAITING and PREEMPTED
    num_waiting_for_kv: int
    num_held_requests: int  # handed over, blocks not yet released
    num_waiting_uncached_tokens: int  # prompt tokens nobody has computed yet
    blocks: BlockCounts
    prefill_tokens_per_s: float
    step_s: float  # a decode step at the present batch
    num_preemptions: int  # since the start
    rates_learnt_at_s: float = 0.0  # monotonic; when a prompt last taught prefill_tokens_per_s
    request_s: float = 0.0  # one more running request adds to a step; 0 while unknown
    kv_token_s: float = 0.0  # one more token of KV adds
    num_computed_tokens: int = 0  # of prompts, since the start


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one step did."""

    num_decodes: int = 0  # requests that ran one token
    num_chunks: int = 0  # requests that ran a piece of their prompt
    num_tokens: int = 0  # tokens in the forward
    num_preemptions: int = 0  # in this step
    predicted_s: float = 0.0
    duration_s: float = 0.0
    has_failed: bool = False  # the whole forward raised


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Result of one step."""

    outputs: list[RequestOutput] = field(default_factory=list)
    stats: StepStats = field(default_factory=StepStats)
