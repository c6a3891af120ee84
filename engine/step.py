"""Runs one schedule: wipe new blocks, forward, sample."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from engine.batch import build_batch
from engine.kv_cache import KVCache
from engine.model_runner import ModelRunner
from engine.sampler import SamplingRow, sample
from engine.schedule import Schedule, ScheduledRequest
from engine.stopping import banned_token_ids
from faults.plan import fault_point

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """What a step did for one request."""

    entry: ScheduledRequest
    token_id: int | None = None  # set when it sampled
    error: str | None = None  # set when this request failed, and it alone


def run_schedule(schedule: Schedule, runner: ModelRunner, kv_cache: KVCache) -> list[RowResult]:
    """Results in the order of the schedule; raises when the forward as a whole fails."""
    _visit_fault_points(schedule.scheduled)
    kv_cache.zero(schedule.new_block_ids)
    logits = runner.forward(build_batch(schedule.scheduled, kv_cache))
    sampling = [entry for entry in schedule.scheduled if entry.samples]
    errors = [_row_error(entry) for entry in sampling]
    token_ids = sample(logits, [_sampling_row(entry, runner) for entry in sampling])
    results = {
        entry.request.request_id: RowResult(
            entry=entry,
            token_id=token_id,
            error=error or ("logits are not finite" if token_id is None else None),
        )
        for entry, token_id, error in zip(sampling, token_ids, errors, strict=True)
    }
    return [
        results.get(entry.request.request_id) or RowResult(entry=entry)
        for entry in schedule.scheduled
    ]


def _sampling_row(entry: ScheduledRequest, runner: ModelRunner) -> SamplingRow:
    request = entry.request
    return SamplingRow(
        params=request.sampling_params,
        position=request.num_tokens,
        banned_token_ids=banned_token_ids(request, runner.eos_token_ids),
    )


def _row_error(entry: ScheduledRequest) -> str | None:
    """The boundary around one row: what fails here fails one request."""
    try:
        verdict = fault_point("sample", request_label=entry.request.request_label)
    except Exception as error:
        logger.exception("sampling for request %s failed", entry.request.request_id)
        return f"{type(error).__name__}: {error}"
    return f"fault at sample: {verdict}" if verdict else None


def _visit_fault_points(scheduled: Sequence[ScheduledRequest]) -> None:
    labels = frozenset(entry.request.request_label for entry in scheduled)
    if any(entry.num_tokens > 1 for entry in scheduled):
        fault_point("prefill_step", request_label=labels)
    if any(entry.num_tokens == 1 for entry in scheduled):
        fault_point("decode_step", request_label=labels)
