"""Runs one schedule: wipe new blocks, forward, sample."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

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
from engine.token_mask import TokenMaskError
from faults.plan import fault_point

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """What a step did for one request."""

    entry: ScheduledRequest
    token_ids: tuple[int, ...] = ()  # one of each of its choices, when it sampled
    error: str | None = None  # set when this request failed, and it alone
    is_refused: bool = False  # with an error: what it asks for cannot be done
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the tokens, when wanted
    prompt_logprobs: PromptLogprobs | None = None
    has_other_token: bool = False  # than the one that a step behind this may have run on


def run_schedule(
    schedule: Schedule, runner: ModelRunner, kv_cache: KVCache, row_maker: RowMaker
) -> list[RowResult]:
    """Results in the order of the schedule; raises when the forward as a whole fails."""
    visit_fault_points(schedule.scheduled)
    kv_cache.zero(schedule.block_ids_to_wipe(kv_cache.spec.block_size))
    attention = runner.plan_attention(schedule.scheduled, kv_cache)
    batch = build_batch(schedule.scheduled, attention, runner.device)
    row_maker.start(entry.request for entry in schedule.scheduled if entry.samples)
    logits = runner.forward(batch)
    results = _sample(schedule.scheduled, logits[: batch.num_samples], row_maker)
    prompts = _prompt_logprobs(schedule.scheduled, logits[batch.num_samples :])
    return [
        replace(
            results.get(id(entry)) or RowResult(entry=entry),
            prompt_logprobs=prompts.get(id(entry)),
        )
        for entry in schedule.scheduled
    ]


def _sample(
    scheduled: Sequence[ScheduledRequest], logits: torch.Tensor, row_maker: RowMaker
) -> dict[int, RowResult]:
    """Identity of the entry -> its result; a prompt of several choices has a row for each."""
    entries = [entry for entry in scheduled if entry.samples]
    made = [make_rows(entry.request, row_maker) for entry in entries]
    counts = [len(rows) for rows, _ in made]
    if sum(counts) > len(counts):
        logits = logits.repeat_interleave(torch.tensor(counts, device=logits.device), dim=0)
    rows = [row for rows, _ in made for row in rows]
    token_ids, errors = _sample_rows(logits, rows)
    logprobs = _output_logprobs(rows, logits, token_ids)
    results: dict[int, RowResult] = {}
    numbers = iter(range(len(rows)))
    for entry, (own_rows, failure) in zip(entries, made, strict=True):
        own = list(islice(numbers, len(own_rows)))
        usable = tuple(token_id for n in own if (token_id := token_ids[n]) is not None)
        row_error = next((errors[n] for n in own if n in errors), None)
        not_finite = "logits are not finite" if len(usable) < len(own) else None
        results[id(entry)] = RowResult(
            entry=entry,
            token_ids=usable,
            error=describe_failure(failure) or row_error or not_finite,
            is_refused=isinstance(failure, TokenMaskError),
            logprobs=tuple(logprobs[n] for n in own if n in logprobs),
        )
    return results


def make_rows(request: Request, row_maker: RowMaker) -> tuple[list[SamplingRow], Exception | None]:
    """The boundary around one request's rows, one a choice: what fails here fails it alone."""
    try:
        verdict = fault_point("sample", request_label=request.request_label)
        row = row_maker.make(request)
    except Exception as error:
        if isinstance(error, TokenMaskError):
            logger.info("request %s cannot go on: %s", request.request_id, error)
        else:
            logger.exception("sampling for request %s failed", request.request_id)
        plain = SamplingRow(params=request.sampling_params, position=request.num_tokens)
        return [plain] * request.num_choices, error
    others = [replace(row, choice_index=choice_index) for choice_index in request.choices[1:]]
    return [row, *others], RuntimeError(f"fault at sample: {verdict}") if verdict else None


def describe_failure(failure: Exception | None) -> str | None:
    """How a request's own failure is told."""
    return None if failure is None else f"{type(failure).__name__}: {failure}"


def _sample_rows(
    logits: torch.Tensor, rows: Sequence[SamplingRow]
) -> tuple[list[int | None], dict[int, str]]:
    """Tokens, and errors by row number; one by one when together they fail, to spare the others."""
    try:
        return sample(logits, rows), {}
    except Exception:
        logger.exception("sampling %d rows together failed", len(rows))
    token_ids: list[int | None] = []
    errors: dict[int, str] = {}
    for n, row in enumerate(rows):
        try:
            token_ids += sample(logits[n : n + 1], [row])
        except Exception as error:
            logger.exception("sampling row %d alone failed", n)
            token_ids.append(None)
            errors[n] = f"{type(error).__name__}: {error}"
    return token_ids, errors


def _output_logprobs(
    rows: Sequence[SamplingRow], logits: torch.Tensor, token_ids: Sequence[int | None]
) -> dict[int, TokenLogprobs]:
    """Row number -> logprobs of its token, where they are wanted."""
    wanted = {
        n: (token_id, num_top)
        for n, (row, token_id) in enumerate(zip(rows, token_ids, strict=True))
        if (num_top := row.params.num_logprobs) is not None and token_id is not None
    }
    if not wanted:
        return {}
    chosen, num_tops = zip(*wanted.values(), strict=True)
    index = torch.tensor(list(wanted), device=logits.device)
    return dict(zip(wanted, token_logprobs(logits[index], chosen, num_tops), strict=True))


def _prompt_logprobs(
    scheduled: Sequence[ScheduledRequest], logits: torch.Tensor
) -> dict[int, PromptLogprobs]:
    """Identity of the entry -> logprobs of the piece of its prompt that this step went through."""
    found: dict[int, PromptLogprobs] = {}
    for entry in scheduled:
        request, positions = entry.request, entry.prompt_logprob_positions
        if not positions:
            continue
        num_top = request.sampling_params.num_prompt_logprobs
        assert num_top is not None
        own, logits = logits[: len(positions)], logits[len(positions) :]
        token_ids = request.token_ids[positions.start : positions.stop]
        entries = token_logprobs(own, token_ids, [num_top] * len(positions))
        found[id(entry)] = PromptLogprobs(positions.start, tuple(entries))
    return found


def visit_fault_points(scheduled: Sequence[ScheduledRequest]) -> None:
    """Where a test may make a step fail, wait or end the process."""
    labels = frozenset(entry.request.request_label for entry in scheduled)
    if any(entry.num_tokens > 1 for entry in scheduled):
        fault_point("prefill_step", request_label=labels)
    if any(entry.num_tokens == 1 for entry in scheduled):
        fault_point("decode_step", request_label=labels)
