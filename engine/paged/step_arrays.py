"""A schedule as the arrays that one step on a device reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.kv_cache import KVCache
from engine.request import Request
from engine.schedule import Schedule, ScheduledRequest

NOT_PENDING = -1


@dataclass(slots=True, kw_only=True)
class StepArrays:
    """Input of one step, on the host; each array is named as what it is on the device."""

    max_row_tokens: int
    max_context_len: int
    arrays: dict[str, npt.NDArray[Any]]


def make_step_arrays(
    schedule: Schedule,
    kv_cache: KVCache,
    pending_rows: Mapping[Request, int],  # whose newest token the step before samples, and where
) -> StepArrays:
    """Lay the requests out in one row of tokens; those with one token come first."""
    scheduled, block_size = schedule.scheduled, kv_cache.spec.block_size
    token_ids: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    row_starts = [0]
    for entry in scheduled:
        token_ids += entry.request.token_ids[entry.start : entry.end]
        positions += range(entry.start, entry.end)
        sources += [NOT_PENDING] * entry.num_tokens
        if entry.samples:
            sources[-1] = pending_rows.get(entry.request, NOT_PENDING)
        row_starts.append(len(token_ids))
    table = _block_table([e.request.block_ids[: -(-e.end // block_size)] for e in scheduled])
    places = np.array(positions, dtype=np.int64)
    rows_of_tokens = np.repeat(np.arange(len(scheduled)), np.diff(row_starts))
    slots = _slots(table[rows_of_tokens, places // block_size], places % block_size, kv_cache)
    return StepArrays(
        max_row_tokens=max(entry.num_tokens for entry in scheduled),
        max_context_len=max(entry.end for entry in scheduled),
        arrays={
            "token_ids": np.array(token_ids, dtype=np.int64),
            "position_ids": places,
            "sources": np.array(sources, dtype=np.int64),
            "write_index": np.stack((slots, slots + block_size)),  # keys, then values
            "row_starts": np.array(row_starts, dtype=np.int32),
            "context_lens": np.array([entry.end for entry in scheduled], dtype=np.int32),
            "block_table": table,
            "sample_index": _sample_index(scheduled),
            "new_block_ids": np.array(schedule.new_block_ids, dtype=np.int64),
        },
    )


def fill_up(step: StepArrays, kv_cache: KVCache, *, num_rows: int, table_width: int) -> StepArrays:
    """A step of single tokens, with rows of nobody behind it that keep to the scratch block."""
    scratch = kv_cache.scratch_block_id
    assert scratch is not None
    own = len(step.arrays["context_lens"])
    fillers = np.arange(num_rows - own) % kv_cache.spec.block_size
    slots = _slots(np.full(num_rows - own, scratch), fillers, kv_cache)
    table = np.zeros((num_rows, table_width), dtype=np.int32)
    table[:own, : step.arrays["block_table"].shape[1]] = step.arrays["block_table"]
    table[own:] = scratch
    both = np.stack((slots, slots + kv_cache.spec.block_size))
    return StepArrays(
        max_row_tokens=1,
        max_context_len=step.max_context_len,
        arrays={
            "token_ids": _lengthened(step.arrays["token_ids"], num_rows, 0),
            "position_ids": _lengthened(step.arrays["position_ids"], num_rows, 0),
            "sources": _lengthened(step.arrays["sources"], num_rows, NOT_PENDING),
            "write_index": np.concatenate((step.arrays["write_index"], both), axis=1),
            "row_starts": np.arange(num_rows + 1, dtype=np.int32),
            "context_lens": _lengthened(step.arrays["context_lens"], num_rows, 1),
            "block_table": table,
            "sample_index": np.arange(num_rows),
            "new_block_ids": _lengthened(step.arrays["new_block_ids"], num_rows, scratch),
        },
    )


def _lengthened(array: npt.NDArray[Any], length: int, filler: int) -> npt.NDArray[Any]:
    """[n] -> [length]."""
    return np.pad(array, (0, length - len(array)), constant_values=filler)


def _sample_index(scheduled: Sequence[ScheduledRequest]) -> npt.NDArray[np.int64]:
    """Tokens whose logits are wanted: the last of each request that samples, [num_samples]."""
    ends = np.cumsum([entry.num_tokens for entry in scheduled], dtype=np.int64)
    return ends[[entry.samples for entry in scheduled]] - 1


def _block_table(own_blocks: Sequence[list[int]]) -> npt.NDArray[np.int32]:
    """[num_rows, blocks of the longest]; zeros behind a row's own."""
    table = np.zeros((len(own_blocks), max(map(len, own_blocks))), dtype=np.int32)
    for row, block_ids in enumerate(own_blocks):
        table[row, : len(block_ids)] = block_ids
    return table


def _slots(
    block_ids: npt.NDArray[Any], offsets: npt.NDArray[Any], kv_cache: KVCache
) -> npt.NDArray[np.int64]:
    """Rows of `KVCache.token_rows` for keys of the first layer, [num_tokens]."""
    rows_per_block = 2 * kv_cache.spec.num_layers * kv_cache.spec.block_size
    slots: npt.NDArray[np.int64] = block_ids.astype(np.int64) * rows_per_block + offsets
    return slots
