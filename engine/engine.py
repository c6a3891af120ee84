"""One model on one rank: token ids in, token ids and numbers out."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.admission import validate_request
from engine.block_hash import BlockHash, hash_root
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.kv_cache import LAYOUT_VERSION, KVCache
from engine.load import BlockCounts, BlockEvents, EngineLoad, StepOutput, StepStats
from engine.model_runner import ModelRunner, choose_num_blocks
from engine.output import add_logprobs, make_output, note_sampled, note_scheduled
from engine.rates import Rates
from engine.request import FinishReason, Request, RequestOutput, RequestStatus
from engine.sampling.params import SamplingParams
from engine.sampling.rows import RowMaker
from engine.schedule import Schedule
from engine.scheduler import Scheduler
from engine.step import RowResult, run_schedule
from engine.stopping import finish_reason

logger = logging.getLogger(__name__)

_STEP_LIMIT_S = 1.0  # a step is planned to stay under this
_WARM_UP_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Blocks promised to a request whose KV comes from a peer."""

    block_ids: list[int]
    num_cached_tokens: int  # leading tokens whose KV is here already


class Engine:
    """Owns model, KV and scheduler of one rank; all methods belong to one thread.

    Invariant: a request is in exactly one queue of the scheduler, or finished and forgotten.
    """

    def __init__(self, config: EngineConfig, *, now: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._now = now
        self._runner = ModelRunner(config)
        self.spec = self._runner.spec
        num_blocks = choose_num_blocks(config, self.spec, self._runner.max_model_len)
        self.kv_cache = KVCache(self.spec, num_blocks)
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
        self.rates = Rates()
        self.predicted_step_s = 0.0  # of the step that runs; other threads may read it
        self._pool = BlockPool(num_blocks)
        self._scheduler = Scheduler(
            self._pool,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            hash_root=self.hash_root,
        )
        self._row_maker = RowMaker(self._runner)
        self._requests: dict[str, Request] = {}

    # Requests in

    def warm_up(self) -> Rates:
        """Run real steps so that the rates are known before the first request."""
        assert not self._requests, "warm up comes before the first request"
        num_tokens = min(
            _WARM_UP_TOKENS, self.config.max_num_batched_tokens, self.max_model_len // 2
        )
        self._run_warm_up(1, num_tokens)
        self.rates = Rates()  # the first run paid for memory and lazy set-up
        self._run_warm_up(1, num_tokens)
        self._run_warm_up(self.config.max_num_seqs, 1)
        self._pool.clear()
        self._pool.drain_events()
        return self.rates

    def add_request(self, request: Request) -> None:
        """Compute the tokens and go on from there; ValueError when that can never be done."""
        self._validate(request)
        self._requests[request.request_id] = request
        request.arrived_at_s = self._now()
        self._scheduler.add(request)

    def reserve(self, request: Request) -> Reservation | None:
        """Take blocks for KV that a peer will send; None when there is no room now."""
        self._validate(request)
        new_block_ids = self._scheduler.reserve(request)
        if new_block_ids is None:
            return None
        self.kv_cache.zero(new_block_ids)
        self._requests[request.request_id] = request
        return Reservation(
            block_ids=list(request.block_ids), num_cached_tokens=request.num_cached_tokens
        )

    def activate(self, request_id: str, first_token_id: int) -> RequestOutput | None:
        """All reserved KV is here; run on from the peer's token, unless it ends the request."""
        request = self._requests.get(request_id)
        if request is None or request.status is not RequestStatus.WAITING_FOR_KV:
            raise ValueError(f"Got {request_id = } but expected a reserved request")
        if not 0 <= first_token_id < self.vocab_size:
            raise ValueError(f"Got {first_token_id = } but expected one below {self.vocab_size}")
        request.arrived_at_s = self._now()
        self._scheduler.activate(request, first_token_id)
        request.has_kv_from_peer = True
        request.prompt_logprobs_start = request.num_prompt_tokens  # the peer has told them
        reason = finish_reason(
            request, eos_token_ids=self.eos_token_ids, max_model_len=self.max_model_len
        )
        if reason is None:
            return None
        self._end(request)
        return make_output(
            request, token_ids=(first_token_id,), finish_reason=reason, with_timings=True
        )

    # Requests out

    def blocks_of(self, request_id: str) -> list[int]:
        """Blocks of a request, in token order; empty when it has none."""
        request = self._requests.get(request_id)
        return list(request.block_ids) if request is not None else []

    def release(self, request_id: str) -> RequestOutput | None:
        """Give up the blocks of a handed-over request; one that still runs is aborted."""
        return self.abort(request_id)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in any state; its last output, or None when there is nothing to say."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        had_ended = request.status is RequestStatus.FINISHED
        self._end(request)
        if had_ended:
            return None
        return make_output(request, finish_reason=FinishReason.ABORT, with_timings=True)

    # Steps

    def has_work(self) -> bool:
        """Whether a step might do something."""
        queues = self._scheduler.queues
        return bool(queues.running or queues.waiting or queues.activated)

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """Schedule, run and apply one step; a failing forward fails its own requests only."""
        started_at_s = self._now()
        schedule = self._schedule()
        if not schedule.scheduled:
            return StepOutput(stats=StepStats(num_preemptions=schedule.num_preemptions))
        for entry in schedule.scheduled:
            note_scheduled(entry.request, started_at_s)
        has_failed = False
        try:
            results = run_schedule(schedule, self._runner, self.kv_cache, self._row_maker)
        except Exception as error:
            logger.exception("a step with %d requests failed", len(schedule.scheduled))
            has_failed = True
            text = f"{type(error).__name__}: {error}"
            results = [RowResult(entry=entry, error=text) for entry in schedule.scheduled]
        ended_at_s = self._now()
        outputs = [add_logprobs(self._apply(each, ended_at_s), each) for each in results]
        stats = StepStats(
            num_decodes=schedule.num_decodes,
            num_chunks=len(schedule.scheduled) - schedule.num_decodes,
            num_tokens=schedule.num_tokens,
            num_preemptions=schedule.num_preemptions,
            predicted_s=self.predicted_step_s,
            duration_s=ended_at_s - started_at_s,
            has_failed=has_failed,
        )
        if not has_failed:
            self.rates.observe(
                num_decodes=stats.num_decodes,
                num_chunk_tokens=stats.num_tokens - stats.num_decodes,
                duration_s=stats.duration_s,
                num_kv_tokens=schedule.num_decode_kv_tokens,
            )
        return StepOutput(outputs=outputs, stats=stats)

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
            num_running=len(queues.running),
            num_waiting=len(queues.waiting) + len(queues.activated),
            num_waiting_for_kv=len(queues.waiting_for_kv),
            num_held_requests=len(queues.held),
            num_waiting_uncached_tokens=self._scheduler.num_uncached_tokens(),
            blocks=self._pool.counts(),
            prefill_tokens_per_s=self.rates.prefill_tokens_per_s,
            rates_age_s=self.rates.age_s,
            step_s=self.rates.decode_step_s(max(1, len(queues.running))),
            request_s=request_s,
            kv_token_s=kv_token_s,
            num_preemptions=self._scheduler.num_preemptions,
        )

    def check_integrity(self) -> None:
        """AssertionError when the books of blocks and requests do not agree."""
        self._pool.check_integrity()
        self._scheduler.check_integrity(self._requests.values())

    def _run_warm_up(self, num_requests: int, num_tokens: int) -> None:
        for number in range(num_requests):
            token_ids = [(number + position) % self.vocab_size for position in range(num_tokens)]
            self.add_request(
                Request(
                    request_id=f"warm-up-{number}",
                    token_ids=token_ids or [0],
                    num_prompt_tokens=max(1, num_tokens),
                    sampling_params=SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
                    # Its own salt each time: a cached prompt would show no speed.
                    cache_salt=f"warm-up-{time.monotonic_ns()}",
                )
            )
        while self.has_work():
            self.step()

    def _validate(self, request: Request) -> None:
        if request.request_id in self._requests:
            raise ValueError(f"Got {request.request_id = } but expected an id not in use")
        validate_request(request, vocab_size=self.vocab_size, max_model_len=self.max_model_len)

    def _schedule(self) -> Schedule:
        num_running = len(self._scheduler.queues.running)
        schedule = self._scheduler.schedule(
            self.config.max_num_batched_tokens,
            max_chunk_tokens=self.rates.max_chunk_tokens(
                num_decodes=num_running, limit_s=_STEP_LIMIT_S
            ),
        )
        self.predicted_step_s = self.rates.predict_s(
            num_decodes=schedule.num_decodes,
            num_chunk_tokens=schedule.num_tokens - schedule.num_decodes,
        )
        return schedule

    def _apply(self, result: RowResult, ended_at_s: float) -> RequestOutput:
        request = result.entry.request
        if result.error is not None:
            return self._fail(request, result.error)
        self._scheduler.update(result.entry, result.token_id)
        if result.token_id is None:
            return make_output(request)
        is_first = not request.has_first_output
        note_sampled(request, ended_at_s)
        reason = finish_reason(
            request, eos_token_ids=self.eos_token_ids, max_model_len=self.max_model_len
        )
        if request.hand_over:
            # Also when it ends here: a peer may be reading the blocks until it is told.
            self._scheduler.hold(request)
        elif reason is not None:
            self._end(request)
        return make_output(
            request,
            token_ids=(result.token_id,),
            finish_reason=reason,
            with_timings=is_first or reason is not None,
        )

    def _fail(self, request: Request, error: str) -> RequestOutput:
        del self._requests[request.request_id]
        self._scheduler.remove(request, is_poisoned=True)
        return make_output(
            request, finish_reason=FinishReason.ERROR, error=error, with_timings=True
        )

    def _end(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._scheduler.remove(request)
