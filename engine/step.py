"""Runs one schedule: wipe new blocks, forward, sample."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.batch import build_batch
from engine.kv_cache import KVCache
from engine.model_runner import ModelRunner
from engine.request import Request
from engine.sampling.logprobs import token_logprobs
from engine.sampling.rows import RowMaker, SamplingRow
from engine.sampling.sampler import sample
from engine.schedule import Schedule, ScheduledRequest
from engine.token_logprobs import PromptLogprobs, TokenLogprobs
from faults.plan import fault_point

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """What a step did for one request."""

    entry: ScheduledRequest
    token_id: int | None = None  # set when it sampled
    error: str | None = None  # set when this request failed, and it alone
    logprobs: TokenLogprobs | None = None  # of the token, when wanted
    prompt_logprobs: PromptLogprobs | None = None


def run_schedule(
    schedule: Schedule, runner: ModelRunner, kv_cache: KVCache, row_maker: RowMaker
) -> list[RowResult]:
    """Results in the order of the schedule; raises when the forward as a whole fails."""
    _visit_fault_points(schedule.scheduled)
    kv_cache.zero(schedule.new_block_ids)
    batch = build_batch(schedule.scheduled, kv_cache)
    row_maker.start(entry.request for entry in schedule.scheduled if entry.samples)
    logits = runner.forward(batch)
    results = _sample(schedule.scheduled, logits[: batch.num_samples], row_maker)
    prompts = _prompt_logprobs(schedule.scheduled, logits[batch.num_samples :])
    return [
        replace(
            results.get(entry.request.request_id) or RowResult(entry=entry),
            prompt_logprobs=prompts.get(entry.request.request_id),
        )
        for entry in schedule.scheduled
    ]


def _sample(
    scheduled: Sequence[ScheduledRequest], logits: torch.Tensor, row_maker: RowMaker
) -> dict[str, RowResult]:
    entries = [entry for entry in scheduled if entry.samples]
    made = [_make_row(entry.request, row_maker) for entry in entries]
    token_ids = sample(logits, [row for row, _ in made])
    logprobs = _output_logprobs(entries, logits, token_ids)
    return {
        entry.request.request_id: RowResult(
            entry=entry,
            token_id=token_id,
            error=error or ("logits are not finite" if token_id is None else None),
            logprobs=logprobs.get(n),
        )
        for n, (entry, token_id, (_, error)) in enumerate(
            zip(entries, token_ids, made, strict=True)
        )
    }


def _make_row(request: Request, row_maker: RowMaker) -> tuple[SamplingRow, str | None]:
    """The boundary around one row: what fails here fails one request."""
    try:
        verdict = fault_point("sample", request_label=request.request_label)
        row = row_maker.make(request)
    except Exception as error:
        logger.exception("sampling for request %s failed", request.request_id)
        plain = SamplingRow(params=request.sampling_params, position=request.num_tokens)
        return plain, f"{type(error).__name__}: {error}"
    return row, f"fault at sample: {verdict}" if verdict else None


def _output_logprobs(
    entries: Sequence[ScheduledRequest], logits: torch.Tensor, token_ids: Sequence[int | None]
) -> dict[int, TokenLogprobs]:
    """Row number -> logprobs of its token, where they are wanted."""
    wanted = {
        n: (token_id, num_top)
        for n, (entry, token_id) in enumerate(zip(entries, token_ids, strict=True))
        if (num_top := entry.request.sampling_params.num_logprobs) is not None
        and token_id is not None
    }
    if not wanted:
        return {}
    chosen, num_tops = zip(*wanted.values(), strict=True)
    rows = torch.tensor(list(wanted), device=logits.device)
    return dict(zip(wanted, token_logprobs(logits[rows], chosen, num_tops), strict=True))


def _prompt_logprobs(
    scheduled: Sequence[ScheduledRequest], logits: torch.Tensor
) -> dict[str, PromptLogprobs]:
    """Request id -> logprobs of the piece of its prompt that this step went through."""
    found: dict[str, PromptLogprobs] = {}
    for entry in scheduled:
        request, positions = entry.request, entry.prompt_logprob_positions
        if not positions:
            continue
        num_top = request.sampling_params.num_prompt_logprobs
        assert num_top is not None
        own, logits = logits[: len(positions)], logits[len(positions) :]
        token_ids = request.token_ids[positions.start : positions.stop]
        entries = token_logprobs(own, token_ids, [num_top] * len(positions))
        found[request.request_id] = PromptLogprobs(positions.start, tuple(entries))
    return found


def _visit_fault_points(scheduled: Sequence[ScheduledRequest]) -> None:
    labels = frozenset(entry.request.request_label for entry in scheduled)
    if any(entry.num_tokens > 1 for entry in scheduled):
        fault_point("prefill_step", request_label=labels)
    if any(entry.num_tokens == 1 for entry in scheduled):
        fault_point("decode_step", request_label=labels)
