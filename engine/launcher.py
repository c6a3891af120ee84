"""Turns a schedule into a launched step, whichever way this engine's device has."""

import logging
from collections.abc import Callable
from functools import partial

import torch

from engine.batch import Batch
from engine.config import EngineConfig
from engine.flight import Flight, failed_results
from engine.kv_cache import KVCache
from engine.model_runner import ModelRunner
from engine.paged.graphs import DecodeGraphs
from engine.paged.inputs import PagedInputs
from engine.paged.sampling import needs_no_tokens
from engine.paged.stepper import PagedStepper
from engine.sampling.rows import RowMaker
from engine.schedule import Schedule
from engine.step import run_schedule

logger = logging.getLogger(__name__)


class StepLauncher:
    """Owns the ways a step can run. Invariant: a launch never raises, its flight tells what failed.

    Where attention gathers blocks, and for requests whose next token depends on the ones before it,
    a step is over when it was launched. Else the device runs it on its own time.
    """

    def __init__(self, runner: ModelRunner, kv_cache: KVCache, *, max_model_len: int) -> None:
        self._runner = runner
        self._kv_cache = kv_cache
        self._row_maker = RowMaker(runner)
        self._graphs: DecodeGraphs | None = None
        self._stepper: PagedStepper | None = None
        self._runs_ahead = runner.config.run_ahead
        if runner.paged is not None:
            self._set_up(runner.config, runner.paged, max_model_len)

    @property
    def graph_bytes(self) -> int:
        """Device memory of captured steps."""
        return 0 if self._graphs is None else self._graphs.num_bytes

    def capture(self) -> None:
        """Capture decode steps, where this engine has such."""
        if self._graphs is not None:
            self._graphs.capture()

    def launch(
        self,
        schedule: Schedule,
        *,
        started_at_s: float,
        predicted_s: float,
        before: Flight | None = None,  # has not landed
    ) -> Flight:
        """Launch a step, behind another one where that runs."""
        stepper = self._stepper
        flight = Flight(
            schedule=schedule,
            started_at_s=started_at_s,
            predicted_s=predicted_s,
            read=list,
        )
        is_queued = stepper is not None and all(
            needs_no_tokens(entry.request) for entry in schedule.scheduled
        )
        assert is_queued or before is None, "only such a step may run ahead"
        try:
            if stepper is not None and is_queued:
                pending_rows = {} if before is None else before.live_rows
                flight.read, places = stepper.launch(schedule, pending_rows)
                flight.pending_rows = places if self._runs_ahead else None
            else:
                results = run_schedule(schedule, self._runner, self._kv_cache, self._row_maker)
                flight.read = lambda: results
        except Exception as error:
            logger.exception("a step with %d requests failed", len(schedule.scheduled))
            flight.has_failed = True
            flight.read = partial(failed_results, schedule, error)
        return flight

    def _set_up(self, config: EngineConfig, inputs: PagedInputs, max_model_len: int) -> None:
        forward: Callable[[Batch], torch.Tensor] = self._runner.forward
        if config.cuda_graphs:
            self._graphs = DecodeGraphs(
                forward,
                inputs,
                self._kv_cache,
                max_model_len=max_model_len,
                max_num_seqs=config.max_num_seqs,
            )
        self._stepper = PagedStepper(forward, inputs, self._graphs, self._kv_cache, self._row_maker)
