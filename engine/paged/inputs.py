"""A step's batch on the device: brought there in one copy, attention over blocks by a kernel."""

from collections.abc import Mapping, Sequence

import torch

from engine.batch import Batch
from engine.kv_cache import KVCache
from engine.paged.accelerator import Accelerator
from engine.paged.attention import PagedAttention
from engine.paged.kernel import PagedKernel, PagedRows
from engine.paged.staging import Staging
from engine.paged.step_arrays import StepArrays, make_step_arrays
from engine.schedule import Schedule, ScheduledRequest


class PagedInputs:
    """Owns the way of a step's numbers to the device.

    `newest_ids` holds what the step before sampled, by its rows: a step queued behind it reads the
    tokens there that the host does not know yet.
    """

    def __init__(
        self,
        kernel: PagedKernel,
        accelerator: Accelerator,
        *,
        device: torch.device,
        max_num_seqs: int,
    ) -> None:
        self.accelerator = accelerator
        self.staging = Staging(accelerator, device)
        self.newest_ids = torch.zeros(max_num_seqs, dtype=torch.long, device=device)
        self._kernel = kernel

    def plan(self, scheduled: Sequence[ScheduledRequest], kv_cache: KVCache) -> PagedAttention:
        """Attention alone, for a step whose tokens are all known."""
        step = make_step_arrays(Schedule(scheduled=list(scheduled)), kv_cache, {})
        return self._attention(step, self.staging.upload(step.arrays), kv_cache)

    def batch(
        self, step: StepArrays, on_device: Mapping[str, torch.Tensor], kv_cache: KVCache
    ) -> Batch:
        """The input of a forward: new blocks wiped, tokens of the step before put in."""
        kv_cache.zero_index(on_device["new_block_ids"])
        sources = on_device["sources"]
        newest = self.newest_ids[sources.clamp(min=0)]
        token_ids = torch.where(sources >= 0, newest, on_device["token_ids"])
        return Batch(
            token_ids=token_ids[None],
            position_ids=on_device["position_ids"][None],
            sample_index=on_device["sample_index"],
            num_samples=len(on_device["sample_index"]),
            attention=self._attention(step, on_device, kv_cache),
        )

    def _attention(
        self, step: StepArrays, on_device: Mapping[str, torch.Tensor], kv_cache: KVCache
    ) -> PagedAttention:
        return PagedAttention(
            kv_cache=kv_cache,
            kernel=self._kernel,
            rows=PagedRows(
                row_starts=on_device["row_starts"],
                context_lens=on_device["context_lens"],
                block_table=on_device["block_table"],
                max_row_tokens=step.max_row_tokens,
                max_context_len=step.max_context_len,
            ),
            write_index=on_device["write_index"].view(-1),
        )
