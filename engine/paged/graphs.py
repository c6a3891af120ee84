"""Decode steps as graphs: captured once for some numbers of rows, replayed for every step.

A step of fewer rows is filled up with rows of nobody, which read and write the scratch block alone.
Tables are as wide as the longest request may get, since shapes are part of a graph.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import Batch
from engine.kv_cache import KVCache
from engine.paged.accelerator import Graph
from engine.paged.inputs import PagedInputs
from engine.paged.sampling import NUM_COLUMNS
from engine.paged.staging import Arrays, Layout
from engine.paged.step_arrays import StepArrays, fill_up
from engine.schedule import Schedule

logger = logging.getLogger(__name__)

_CAPTURE_WITHIN_S = 15.0  # a start waits no longer; the sizes left use the next larger graph


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows that get a graph: 1, 2, 4, 8, then at most a quarter of the rows too many."""
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs]
    size = 8
    while size < max_num_seqs:
        sizes.append(size)
        size += max(8, (1 << (size.bit_length() - 1)) // 4)
    return [*sizes, max_num_seqs]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    graph: Graph
    inputs: torch.Tensor  # [bytes] uint8: what the graph reads
    results: list[torch.Tensor]  # logits [rows, vocab]: what it leaves


class DecodeGraphs:
    """Owns the graphs and the memory they read. Invariant: a replay is a forward of its rows.

    Its logits are there until the next replay of any graph.
    """

    def __init__(
        self,
        forward: Callable[[Batch], torch.Tensor],
        inputs: PagedInputs,
        kv_cache: KVCache,
        *,
        max_model_len: int,
        max_num_seqs: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._forward = forward
        self._inputs = inputs
        self._kv_cache = kv_cache
        self._max_model_len = max_model_len
        self._table_width = -(-max_model_len // kv_cache.spec.block_size)
        self._wanted = graph_sizes(max_num_seqs)
        self._now = now
        self._captured: dict[int, _Captured] = {}
        self.num_bytes = 0  # device memory that came with them

    @property
    def sizes(self) -> list[int]:
        """Numbers of rows that have a graph."""
        return sorted(self._captured)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the largest first, whose memory the others share; none where one fails."""
        accelerator = self._inputs.accelerator
        before, began_s = accelerator.reserved_bytes(), self._now()
        try:
            for size in sorted(self._wanted, reverse=True):
                if self._now() - began_s > _CAPTURE_WITHIN_S:
                    logger.warning("no time to capture graphs below %d rows", self.sizes[0])
                    break
                self._captured[size] = self._capture(size)
        except Exception:
            logger.exception("decode steps of this model cannot be captured: they run without")
            self._captured.clear()
        self.num_bytes = max(0, accelerator.reserved_bytes() - before)
        took_s, mib = self._now() - began_s, self.num_bytes / 2**20
        logger.info("graphs for %s rows after %.1f s, %.1f MiB", self.sizes, took_s, mib)

    def run(
        self, schedule: Schedule, step: StepArrays, more: Arrays
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]] | None:
        """Queue a step; logits [rows, vocab] and `more` on the device. None where no graph fits.

        Each of `more` has a column for each row.
        """
        num_rows = len(schedule.scheduled)
        size = next((size for size in self.sizes if size >= num_rows), None)
        is_decode = all(entry.num_tokens == 1 and entry.samples for entry in schedule.scheduled)
        if size is None or not is_decode or len(schedule.new_block_ids) > size:
            return None
        filled = fill_up(step, self._kv_cache, num_rows=size, table_width=self._table_width)
        wide = {name: np.pad(array, ((0, 0), (0, size - num_rows))) for name, array in more.items()}
        captured = self._captured[size]
        on_device = self._inputs.staging.upload({**filled.arrays, **wide}, into=captured.inputs)
        captured.graph.replay()
        own = {name: on_device[name][:, :num_rows] for name in more}
        return captured.results[0][:num_rows], own

    def _capture(self, size: int) -> _Captured:
        nobody = StepArrays(
            max_row_tokens=1,
            # What a kernel may plan with is fixed with the graph: the most that can come.
            max_context_len=self._max_model_len,
            arrays={
                name: np.zeros(shape, dtype=dtype)
                for name, shape, dtype in (
                    ("token_ids", 0, np.int64),
                    ("position_ids", 0, np.int64),
                    ("sources", 0, np.int64),
                    ("write_index", (2, 0), np.int64),
                    ("context_lens", 0, np.int32),
                    ("block_table", (0, 0), np.int32),
                    ("new_block_ids", 0, np.int64),
                )
            },
        )
        step = fill_up(nobody, self._kv_cache, num_rows=size, table_width=self._table_width)
        arrays = {**step.arrays, "columns": np.zeros((NUM_COLUMNS, size))}
        device = self._kv_cache.tensor.device
        memory = torch.empty(Layout.of(arrays).num_bytes, dtype=torch.uint8, device=device)
        views = self._inputs.staging.upload(arrays, into=memory)
        results: list[torch.Tensor] = []

        def run() -> None:
            batch = self._inputs.batch(step, views, self._kv_cache)
            results[:] = [self._forward(batch)]

        graph = self._inputs.accelerator.capture(run)
        return _Captured(graph=graph, inputs=memory, results=results)
