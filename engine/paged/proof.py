"""Tries attention kernels on blocks of a model's shape, against attention that gathers them."""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.gathered_attention import GatheredAttention
from engine.kv_cache import KVCache, KVCacheSpec
from engine.layer_attention import LayerAttention
from engine.paged.attention import PagedAttention
from engine.paged.kernel import PagedKernel, PagedRows, kernel_candidates
from engine.paged.step_arrays import make_step_arrays
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.schedule import Schedule, ScheduledRequest

logger = logging.getLogger(__name__)

# Of the largest number: rounding of two ways to add.
_TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 5e-3,
    torch.bfloat16: 3e-2,
}


def find_kernel(
    spec: KVCacheSpec, *, num_heads: int, windows: Sequence[int | None]
) -> PagedKernel | None:
    """The first kernel that is right for this model here; None where none is."""
    for name, kernel in kernel_candidates(torch.device(spec.device)):
        try:
            deviation = max(
                _deviation(kernel, spec, num_heads=num_heads, window=window) for window in windows
            )
        except Exception as error:  # noqa: BLE001 - whatever it says, it is not this one
            logger.info("%s cannot page here: %s", name, str(error).partition("\n")[0])
            continue
        if deviation <= _TOLERANCES[spec.torch_dtype]:
            logger.info("attention over blocks by %s", name)
            return kernel
        logger.warning("%s pages wrongly here, off by %.2g: not used", name, deviation)
    return None


@torch.inference_mode()
def _deviation(
    kernel: PagedKernel, spec: KVCacheSpec, *, num_heads: int, window: int | None
) -> float:
    """How far the kernel's answer is off, in parts of the largest number; NaN is infinitely far."""
    spec, size = replace(spec, num_layers=2), spec.block_size
    scheduled = [
        _share([3, 1], start=size + size // 2, num_tokens=1),
        _share([6], start=0, num_tokens=1),
        _share([5, 2], start=size - 1, num_tokens=size // 2 + 2),
        _share([0, 4], start=0, num_tokens=size + 1),
    ]
    generator = torch.Generator(spec.device).manual_seed(0)
    num_tokens = sum(entry.num_tokens for entry in scheduled)
    heads = [
        torch.randn(
            (number, num_tokens, spec.head_dim),
            dtype=spec.torch_dtype,
            device=spec.device,
            generator=generator,
        )
        for number in (num_heads, spec.num_kv_heads, spec.num_kv_heads)
    ]
    caches = [KVCache(spec, 7), KVCache(spec, 7)]
    caches[0].tensor.normal_(generator=generator)
    caches[1].tensor.copy_(caches[0].tensor)
    # A window that some of these contexts reach past.
    layer = LayerAttention(1, spec.head_dim**-0.5, window and min(window, size))
    expected = GatheredAttention.plan(scheduled, caches[0]).attend(layer, *heads)
    answer = _paged(scheduled, caches[1], kernel).attend(layer, *heads)
    scale = expected.abs().max().clamp(min=1e-6)
    off = float((answer - expected).abs().max() / scale)
    return off if math.isfinite(off) else math.inf


def _share(block_ids: list[int], *, start: int, num_tokens: int) -> ScheduledRequest:
    end = start + num_tokens
    request = Request(
        request_id="proof",
        token_ids=[0] * end,
        num_prompt_tokens=end,
        sampling_params=SamplingParams(max_tokens=1),
    )
    request.block_ids = block_ids
    return ScheduledRequest(request=request, start=start, end=end)


def _paged(
    scheduled: Sequence[ScheduledRequest], kv_cache: KVCache, kernel: PagedKernel
) -> PagedAttention:
    schedule = Schedule(scheduled=list(scheduled))
    step = make_step_arrays(schedule, kv_cache, {})
    on_device = {
        name: torch.from_numpy(array).to(kv_cache.tensor.device)
        for name, array in step.arrays.items()
    }
    rows = PagedRows(
        row_starts=on_device["row_starts"],
        context_lens=on_device["context_lens"],
        block_table=on_device["block_table"],
        max_row_tokens=step.max_row_tokens,
        max_context_len=step.max_context_len,
    )
    return PagedAttention(
        kv_cache=kv_cache, kernel=kernel, rows=rows, write_index=on_device["write_index"].view(-1)
    )
