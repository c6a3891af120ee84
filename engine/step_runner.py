"""Step after step: schedule, launch, land, apply; where the device allows it, one step ahead."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch

from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.flight import Flight
from engine.launcher import StepLauncher
from engine.live_requests import LiveRequests
from engine.load import StepOutput, StepStats
from engine.output import add_logprobs, make_output, note_sampled, note_scheduled
from engine.paged.sampling import needs_no_tokens
from engine.rates import Rates
from engine.request import Request, RequestOutput
from engine.run_ahead import as_if_landed, is_steady
from engine.schedule import Schedule
from engine.scheduler import Scheduler
from engine.step import RowResult

logger = logging.getLogger(__name__)

STEP_LIMIT_S = 1.0  # a step is planned to stay under this

OnStart = Callable[[Request], None]


class StepRunner:
    """Owns what is launched, and what is learnt from it.

    Invariant: between two calls the books of requests and blocks are those of the last step that
    landed; a step launched behind it has only taken blocks for its tokens.
    """

    def __init__(
        self,
        config: EngineConfig,
        launcher: StepLauncher,
        scheduler: Scheduler,
        pool: BlockPool,
        requests: LiveRequests,
        *,
        now: Callable[[], float],
    ) -> None:
        self.rates = Rates()
        self.predicted_step_s = 0.0  # of the step that runs
        self.num_computed_tokens = 0  # of prompts
        self._config = config
        self._launcher = launcher
        self._scheduler = scheduler
        self._pool = pool
        self._requests = requests
        self._now = now
        self._ahead: Flight | None = None  # launched behind the last step that landed
        self._landed: deque[StepOutput] = deque()  # whose outputs nobody has taken yet
        self._last_end_s = float("-inf")

    @property
    def has_launched(self) -> bool:
        """Whether a step is launched or landed whose outputs nobody has taken yet."""
        return self._ahead is not None or bool(self._landed)

    @torch.inference_mode()
    def step(self, on_start: OnStart) -> StepOutput:
        """Run and apply one step, and launch the next behind it where that can be."""
        if self._landed:
            return self._landed.popleft()
        flight, self._ahead = self._ahead, None
        if flight is None:
            schedule = self._schedule()
            if not schedule.scheduled:
                return StepOutput(stats=StepStats(num_preemptions=schedule.num_preemptions))
            flight = self._launch(schedule, on_start)
        ahead = self._launch_ahead(flight, on_start)
        output = self._land(flight, ahead)
        self._ahead = ahead
        return output

    @torch.inference_mode()
    def land(self) -> None:
        """Nothing runs any more: blocks may change hands, also to those the device knows not."""
        if self._ahead is not None:
            flight, self._ahead = self._ahead, None
            self._landed.append(self._land(flight, None))

    def take_landed(self) -> list[StepOutput]:
        """Steps that have landed since the last one; what they say comes before anything later."""
        landed = list(self._landed)
        self._landed.clear()
        return landed

    def _schedule(self) -> Schedule:
        num_running = len(self._scheduler.queues.running)
        schedule = self._scheduler.schedule(
            self._config.max_num_batched_tokens,
            max_chunk_tokens=self.rates.max_chunk_tokens(
                num_decodes=num_running, limit_s=STEP_LIMIT_S
            ),
        )
        self.predicted_step_s = self.rates.predict_s(
            num_decodes=schedule.num_decodes,
            num_chunk_tokens=schedule.num_tokens - schedule.num_decodes,
        )
        return schedule

    def _launch(
        self, schedule: Schedule, on_start: OnStart, *, before: Flight | None = None
    ) -> Flight:
        started_at_s = self._now()
        for entry in schedule.scheduled:
            if note_scheduled(entry.request, started_at_s):
                on_start(entry.request)
        return self._launcher.launch(
            schedule,
            started_at_s=started_at_s,
            predicted_s=self.predicted_step_s,
            before=before,
        )

    def _launch_ahead(self, flight: Flight, on_start: OnStart) -> Flight | None:
        """The step behind one that runs, where it does not depend on what that one gives."""
        queues = self._scheduler.queues
        if flight.pending_rows is None or not is_steady(queues, self._pool):
            return None
        if not all(needs_no_tokens(request) for request in queues.running):
            return None
        max_model_len = self._requests.max_model_len
        with as_if_landed(flight.live_entries, max_model_len=max_model_len):
            schedule = self._schedule()
            if not schedule.scheduled:
                return None
            return self._launch(schedule, on_start, before=flight)

    def _land(self, flight: Flight, ahead: Flight | None) -> StepOutput:
        """Wait for a step and apply it; what runs `ahead` is told whom it mistook."""
        results = [each for each in flight.results() if flight.counts_for(each.entry.request)]
        ended_at_s = self._now()
        if ahead is not None:
            ahead.mistaken |= {each.entry.request for each in results if each.has_other_token}
        outputs = [output for result in results for output in self._apply_alone(result, ended_at_s)]
        return StepOutput(outputs=outputs, stats=self._note_step(flight, ended_at_s))

    def _note_step(self, flight: Flight, ended_at_s: float) -> StepStats:
        schedule = flight.schedule
        # One that was launched ahead begins when the one before it is over.
        started_at_s = max(flight.started_at_s, self._last_end_s)
        self._last_end_s = ended_at_s
        stats = StepStats(
            num_decodes=schedule.num_decodes,
            num_chunks=len(schedule.scheduled) - schedule.num_decodes,
            num_tokens=schedule.num_tokens,
            num_preemptions=schedule.num_preemptions,
            predicted_s=flight.predicted_s,
            duration_s=ended_at_s - started_at_s,
            has_failed=flight.has_failed,
        )
        if not flight.has_failed:
            num_chunk_tokens = stats.num_tokens - stats.num_decodes
            self.num_computed_tokens += num_chunk_tokens
            self.rates.observe(
                num_decodes=stats.num_decodes,
                num_chunk_tokens=num_chunk_tokens,
                duration_s=stats.duration_s,
                num_kv_tokens=schedule.num_decode_kv_tokens,
            )
        return stats

    def _apply_alone(self, result: RowResult, ended_at_s: float) -> list[RequestOutput]:
        """The boundary around what a step means for one request: what fails here fails it alone."""
        request = result.entry.request
        try:
            return add_logprobs(self._apply(result, ended_at_s), result)
        except Exception as error:
            logger.exception("applying a step to request %s failed", request.request_id)
            return self._requests.fail(request, f"{type(error).__name__}: {error}")

    def _apply(self, result: RowResult, ended_at_s: float) -> list[RequestOutput]:
        request = result.entry.request
        if result.error is not None:
            failed = self._requests.fail(request, result.error)
            return [replace(output, is_refused=result.is_refused) for output in failed]
        self._scheduler.update(result.entry)
        if result.prompt_logprobs is not None:
            # Before it forks: its choices must not tell them again.
            request.prompt_logprobs_start = result.prompt_logprobs.end_position
        if not result.token_ids:
            return [make_output(request)]
        is_first = not request.has_first_output
        note_sampled(request, ended_at_s)
        tokens = dict(zip(request.choices, result.token_ids, strict=True))
        return self._requests.go_on(request, tokens, with_timings=is_first)
