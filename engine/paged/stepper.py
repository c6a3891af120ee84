"""Steps that are launched now and read later: only token ids come back from the device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from engine.batch import Batch
from engine.flight import Reader
from engine.kv_cache import KVCache
from engine.paged.accelerator import Mark
from engine.paged.graphs import DecodeGraphs
from engine.paged.inputs import PagedInputs
from engine.paged.sampling import (
    may_be_undecided,
    sample_queued,
    sampling_columns,
)
from engine.paged.step_arrays import make_step_arrays
from engine.request import Request
from engine.sampling.rows import RowMaker, SamplingRow
from engine.sampling.sampler import sample
from engine.schedule import Schedule, ScheduledRequest
from engine.step import RowResult, describe_failure, make_rows, visit_fault_points


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampled:
    """What one launched step samples, on its way to the host."""

    entries: list[ScheduledRequest]  # those that sample, in the order of the rows
    rows: list[SamplingRow]
    failures: list[Exception | None]
    logits: torch.Tensor | None  # [rows, vocab], kept where some row may want a second look
    answer: torch.Tensor  # [3, rows] int64 on the host, once `mark` has passed
    mark: Mark


class PagedStepper:
    """Owns how steps are launched on a device. Invariant: a launch waits for no result."""

    def __init__(
        self,
        forward: Callable[[Batch], torch.Tensor],
        inputs: PagedInputs,
        graphs: DecodeGraphs | None,
        kv_cache: KVCache,
        row_maker: RowMaker,
    ) -> None:
        self.graphs = graphs
        self._forward = forward
        self._inputs = inputs
        self._kv_cache = kv_cache
        self._row_maker = row_maker

    def launch(
        self, schedule: Schedule, pending_rows: Mapping[Request, int]
    ) -> tuple[Reader, dict[Request, int]]:
        """Queue a step; what reads it, and where the next one finds each request's token."""
        visit_fault_points(schedule.scheduled)
        entries = [entry for entry in schedule.scheduled if entry.samples]
        made = [make_rows(entry.request, self._row_maker) for entry in entries]
        rows = [row for own, _ in made for row in own]
        logits, columns = self._forward_queued(schedule, rows, pending_rows)
        failures = [failure for _, failure in made]
        sampled = self._sample_queued(entries, rows, failures, logits, columns)
        places = {entry.request: row for row, entry in enumerate(entries)}

        def read() -> list[RowResult]:
            return _read(schedule, sampled)

        return read, places

    def _forward_queued(
        self, schedule: Schedule, rows: list[SamplingRow], pending_rows: Mapping[Request, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of those that sample [rows, vocab], and the columns of their sampling."""
        step = make_step_arrays(schedule, self._kv_cache, pending_rows)
        columns = {"columns": sampling_columns(rows)}
        if self.graphs is not None:
            queued = self.graphs.run(schedule, step, columns)
            if queued is not None:
                logits, own = queued
                return logits, own["columns"]
        on_device = self._inputs.staging.upload({**step.arrays, **columns})
        batch = self._inputs.batch(step, on_device, self._kv_cache)
        return self._forward(batch), on_device["columns"]

    def _sample_queued(
        self,
        entries: list[ScheduledRequest],
        rows: list[SamplingRow],
        failures: list[Exception | None],
        logits: torch.Tensor,
        columns: torch.Tensor,
    ) -> _Sampled:
        accelerator = self._inputs.accelerator
        answer = accelerator.host_memory(3 * 8 * len(rows)).view(torch.long).view(3, len(rows))
        if rows:
            on_device = sample_queued(logits, columns, rows)
            self._inputs.newest_ids[: len(rows)].copy_(on_device[0])
            accelerator.copy(answer, on_device)
        return _Sampled(
            entries=entries,
            rows=rows,
            failures=failures,
            # The next replay of a graph overwrites its logits.
            logits=logits.clone() if any(may_be_undecided(row) for row in rows) else None,
            answer=answer,
            mark=accelerator.mark(),
        )


def _read(schedule: Schedule, sampled: _Sampled) -> list[RowResult]:
    """Wait for a step; a result for each of its entries."""
    sampled.mark.synchronize()
    results: dict[int, RowResult] = {}
    rows = zip(sampled.entries, sampled.failures, *sampled.answer.tolist(), strict=True)
    for n, (entry, failure, token_id, is_usable, is_decided) in enumerate(rows):
        decided = token_id if is_usable else None
        if is_usable and not is_decided:
            assert sampled.logits is not None
            [decided] = sample(sampled.logits[n : n + 1], sampled.rows[n : n + 1])
        results[id(entry)] = RowResult(
            entry=entry,
            token_ids=() if decided is None else (decided,),
            error=describe_failure(failure) or (None if is_usable else "logits are not finite"),
            has_other_token=decided != token_id,
        )
    return [results.get(id(entry)) or RowResult(entry=entry) for entry in schedule.scheduled]
