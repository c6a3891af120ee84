"""One model on one rank: token ids in, token ids and numbers out."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from engine.admission import validate_choices, validate_request
from engine.block_hash import BlockHash, hash_root
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.kv_cache import LAYOUT_VERSION, KVCache
from engine.launcher import StepLauncher
from engine.live_requests import LiveRequests
from engine.load import BlockCounts, BlockEvents, EngineLoad, StepOutput
from engine.memory_report import MemoryReport
from engine.model_runner import ModelRunner
from engine.native.library import load_library
from engine.rates import Rates
from engine.request import Request, RequestOutput, RequestStatus, Reservation
from engine.scheduler import Scheduler
from engine.step_runner import StepRunner
from engine.warm_up import run_warm_up

logger = logging.getLogger(__name__)

_WARM_UP_TOKENS = 128  # enough to tell the speed of prompts; more would only delay the start


class Engine:
    """Owns model, KV and scheduler of one rank; all methods belong to one thread.

    Invariants: a request, or each of its choices, is in exactly one queue of the scheduler, or
    finished and forgotten; each choice ends in exactly one output with a finish reason.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        is_kv_shared: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._now = now
        self._runner = ModelRunner(config)
        self.spec = self._runner.spec
        num_blocks = self._runner.choose_num_blocks(config)
        is_kv_shared = is_kv_shared and self.spec.device == "cpu"
        self.kv_cache = KVCache(
            self.spec,
            num_blocks,
            is_shared=is_kv_shared,
            has_scratch_block=self._runner.paged is not None,
        )
        self.max_model_len = min(self._runner.max_model_len, num_blocks * config.block_size)
        self.vocab_size = self._runner.vocab_size
        self.eos_token_ids = self._runner.eos_token_ids
        self.hash_root: BlockHash = hash_root(
            model_id=config.model_id or config.model_path,
            model_revision=config.model_revision,
            dtype=self.spec.dtype,
            block_size=config.block_size,
            layout_version=LAYOUT_VERSION,
            rope_variant=self._runner.rope_variant,
        )
        self._pool = BlockPool(num_blocks)
        self._scheduler = Scheduler(
            self._pool,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            hash_root=self.hash_root,
        )
        self._requests = LiveRequests(
            self._scheduler,
            self.kv_cache,
            eos_token_ids=self.eos_token_ids,
            max_model_len=self.max_model_len,
        )
        self._launcher = StepLauncher(self._runner, self.kv_cache, max_model_len=self.max_model_len)
        self._steps = StepRunner(
            config, self._launcher, self._scheduler, self._pool, self._requests, now=now
        )
        self.memory = self._report_memory()

    @property
    def rates(self) -> Rates:
        """How fast this engine is."""
        return self._steps.rates

    @property
    def predicted_step_s(self) -> float:
        """Of the step that runs; other threads may read it."""
        return self._steps.predicted_step_s

    @property
    def num_threads_to_pin(self) -> int:
        """Threads that compute on cores; 0 where none can be told which."""
        if not self.config.pin_threads or self.spec.device != "cpu" or not load_library():
            return 0
        return torch.get_num_threads()

    def pin_threads(self, cores: Sequence[int]) -> None:
        """Keep this thread, and those that help it compute, on one of these cores each."""
        torch.ops.relevo.pin_threads(list(cores))

    # Requests in

    def warm_up(self) -> Rates:
        """Run real steps so that the rates are known before the first request."""
        assert not self._requests, "warm up comes before the first request"
        num_tokens = min(
            _WARM_UP_TOKENS, self.config.max_num_batched_tokens, self.max_model_len // 2
        )
        run_warm_up(self, num_requests=1, num_tokens=num_tokens)
        self._launcher.capture()
        self._steps.rates = Rates()  # the first run paid for memory and lazy set-up
        run_warm_up(self, num_requests=1, num_tokens=num_tokens)
        run_warm_up(self, num_requests=self.config.max_num_seqs, num_tokens=1)
        self._pool.clear()
        self._pool.drain_events()
        self.memory = self._report_memory()  # now with what steps need
        logger.info("memory: %s", self.memory)
        return self.rates

    def add_request(self, request: Request) -> None:
        """Compute the tokens and go on from there; ValueError when that can never be done."""
        self._validate(request)
        self._requests.add(request)
        request.arrived_at_s = self._now()
        self._scheduler.add(request)

    def reserve(self, request: Request) -> Reservation | None:
        """Take blocks for KV that a peer will send; None when there is no room now."""
        self._validate(request)
        self._steps.land()
        new_block_ids = self._scheduler.reserve(request)
        if new_block_ids is None:
            return None
        # the peer's tokens fill the others, whole; nobody computes with them before that
        first_not_full = request.num_tokens // self.config.block_size
        not_full = set(request.block_ids[first_not_full:])
        self.kv_cache.zero([block_id for block_id in new_block_ids if block_id in not_full])
        self._requests.add(request)
        return Reservation(
            block_ids=list(request.block_ids), num_cached_tokens=request.num_cached_tokens
        )

    def activate(self, request_id: str, first_tokens: Mapping[int, int]) -> list[RequestOutput]:
        """All reserved KV is here; run on from the peer's tokens, of each choice still to run.

        Returns the outputs of those that their token ends.
        """
        self._steps.land()
        request = next(iter(self._requests.get(request_id)), None)
        if request is None or request.status is not RequestStatus.WAITING_FOR_KV:
            raise ValueError(f"Got {request_id = } but expected a reserved request")
        if not set(first_tokens) <= set(request.choices) or not first_tokens:
            raise ValueError(f"Got {first_tokens = } but expected some of {request.choices = }")
        if not all(0 <= token_id < self.vocab_size for token_id in first_tokens.values()):
            raise ValueError(f"Got {first_tokens = } but expected ids below {self.vocab_size}")
        request.arrived_at_s = self._now()
        request.has_kv_from_peer = True
        request.prompt_logprobs_start = request.num_prompt_tokens  # the peer has told them
        self._scheduler.activate(request)
        outputs = self._requests.go_on(request, first_tokens, with_timings=True)
        return [output for output in outputs if output.finish_reason is not None]

    # Requests out

    def blocks_of(self, request_id: str) -> list[int]:
        """Blocks of a request, in token order; empty when it has none."""
        return [block_id for each in self._requests.get(request_id) for block_id in each.block_ids]

    def release(self, request_id: str) -> list[RequestOutput]:
        """Give up the blocks of a handed-over request; one that still runs is aborted."""
        return self.abort(request_id)

    def abort(self, request_id: str, *, in_flight: Sequence[int] = ()) -> list[RequestOutput]:
        """End a request in any state; the last output of each choice that had not ended.

        Blocks that a link may still read or write go to quarantine, until `end_quarantine`.
        """
        self._steps.land()
        self._pool.quarantine(in_flight)
        return self._requests.abort(request_id)

    def abort_choice(self, request_id: str, choice_index: int) -> list[RequestOutput]:
        """End one choice, also one whose prompt is still being computed; the others go on."""
        self._steps.land()
        return self._requests.abort_choice(request_id, choice_index)

    def end_quarantine(self, block_ids: Sequence[int]) -> None:
        """No link reads or writes these any more."""
        self._pool.end_quarantine(block_ids)

    # Steps

    def has_work(self) -> bool:
        """Whether a step might do something."""
        queues = self._scheduler.queues
        is_queued = bool(queues.running or queues.waiting or queues.activated)
        return is_queued or self._steps.has_launched

    def step(self, on_start: Callable[[Request], None] = lambda _: None) -> StepOutput:
        """Run and apply one step; a failing forward fails its own requests only.

        `on_start` hears, before the forward, of each request that has never run before.
        """
        return self._steps.step(on_start)

    def take_landed(self) -> list[StepOutput]:
        """Steps that a verb had to end before it could begin; they come before what it says."""
        return self._steps.take_landed()

    # Numbers

    def block_counts(self) -> BlockCounts:
        """Blocks by state."""
        return self._pool.counts()

    def drain_block_events(self) -> BlockEvents:
        """Changes of the prefix cache since the last call."""
        return self._pool.drain_events()

    def cached_block_hashes(self) -> list[BlockHash]:
        """Everything the prefix cache can find now."""
        return self._pool.cached_hashes()

    def load(self) -> EngineLoad:
        """How busy the engine is."""
        queues = self._scheduler.queues
        request_s, kv_token_s = self.rates.step_costs.marginal()
        return EngineLoad(
            num_running=queues.num_running_seqs,
            num_waiting=sum(each.num_seqs for each in (*queues.waiting, *queues.activated)),
            num_waiting_for_kv=len(queues.waiting_for_kv),
            num_held_requests=len(queues.held),
            num_waiting_uncached_tokens=self._scheduler.num_uncached_tokens(),
            blocks=self._pool.counts(),
            prefill_tokens_per_s=self.rates.prefill_tokens_per_s,
            rates_learnt_at_s=self.rates.learnt_at_s,
            step_s=self.rates.decode_step_s(max(1, queues.num_running_seqs)),
            request_s=request_s,
            kv_token_s=kv_token_s,
            num_preemptions=self._scheduler.num_preemptions,
            num_computed_tokens=self._steps.num_computed_tokens,
        )

    def check_integrity(self) -> None:
        """AssertionError when the books of blocks and requests do not agree."""
        self._pool.check_integrity()
        self._scheduler.check_integrity(self._requests)

    def _report_memory(self) -> MemoryReport:
        return self._runner.report_memory(
            self.kv_cache,
            max_model_len=self.max_model_len,
            graph_bytes=self._launcher.graph_bytes,
        )

    def _validate(self, request: Request) -> None:
        if request.request_id in self._requests:
            raise ValueError(f"Got {request.request_id = } but expected an id not in use")
        validate_request(request, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        validate_choices(
            request,
            max_num_seqs=self.config.max_num_seqs,
            num_kv_blocks=self.kv_cache.num_blocks,
            block_size=self.config.block_size,
        )
