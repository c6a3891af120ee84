"""Attention over KV blocks where they lie, by a kernel of somebody else's.

Which kernel works depends on the card, the build of torch, the width of heads and the block size:
torch's own pages only through FlashAttention 3 or 4, FlashAttention 2 only blocks of whole 256
tokens, none of them float32. So nobody is asked for a version: every kernel there is is tried at
load on blocks of this model's shape, and the first that gives what gathered attention gives is it.
"""

import importlib
import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.layer_attention import LayerAttention

logger = logging.getLogger(__name__)

# FlashAttention's generation for each major compute capability, where a package brings it.
_GENERATIONS = {9: "FA3", 10: "FA4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRows:
    """The requests of one packed row of tokens."""

    row_starts: torch.Tensor  # [num_rows + 1] int32: first token of each
    context_lens: torch.Tensor  # [num_rows] int32: tokens to attend to, this step's included
    block_table: torch.Tensor  # [num_rows, blocks] int32; behind a row's own: any
    max_row_tokens: int
    max_context_len: int


class PagedKernel(Protocol):
    """Causal attention of each row's newest tokens to all of its own."""

    def __call__(
        self,
        layer: LayerAttention,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        keys: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
        values: torch.Tensor,  # the same
        rows: PagedRows,
    ) -> torch.Tensor:
        """[num_tokens, num_heads, head_dim]; queues work and asks for no number."""


@dataclass(frozen=True, slots=True)
class TorchVarlen:
    """`torch.nn.attention.varlen.varlen_attn` with a block table, where this torch has one."""

    function: Any
    has_key_starts: bool  # FlashAttention 2 wants them beside a block table, 3 must not get them

    def __call__(
        self,
        layer: LayerAttention,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: PagedRows,
    ) -> torch.Tensor:
        """See `PagedKernel`."""
        output: torch.Tensor = self.function(
            query,
            keys,
            values,
            rows.row_starts,
            key_starts(rows) if self.has_key_starts else None,
            rows.max_row_tokens,
            rows.max_context_len,
            scale=layer.scaling,
            window_size=window_of(layer),
            enable_gqa=query.shape[1] != keys.shape[2],
            seqused_k=rows.context_lens,
            block_table=rows.block_table,
        )
        return output


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """`flash_attn_varlen_func` of the package flash-attn."""

    function: Any

    def __call__(
        self,
        layer: LayerAttention,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: PagedRows,
    ) -> torch.Tensor:
        """See `PagedKernel`."""
        output: torch.Tensor = self.function(
            query,
            keys,
            values,
            cu_seqlens_q=rows.row_starts,
            cu_seqlens_k=key_starts(rows),
            max_seqlen_q=rows.max_row_tokens,
            max_seqlen_k=rows.max_context_len,
            softmax_scale=layer.scaling,
            causal=True,
            window_size=window_of(layer),
            block_table=rows.block_table,
        )
        return output


@dataclass(frozen=True, slots=True)
class FlashAttention3:
    """`flash_attn_with_kvcache` of FlashAttention 3's own package, with any torch."""

    function: Any

    def __call__(
        self,
        layer: LayerAttention,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: PagedRows,
    ) -> torch.Tensor:
        """See `PagedKernel`."""
        output: torch.Tensor = self.function(
            query,
            keys,
            values,
            cache_seqlens=rows.context_lens,
            page_table=rows.block_table,
            cu_seqlens_q=rows.row_starts,
            max_seqlen_q=rows.max_row_tokens,
            softmax_scale=layer.scaling,
            causal=True,
            window_size=window_of(layer),
        )
        return output


def window_of(layer: LayerAttention) -> tuple[int, int]:
    """What all of them take for a window: tokens before the own one and behind it; -1 = all."""
    return (-1 if layer.window is None else layer.window - 1, 0)


def key_starts(rows: PagedRows) -> torch.Tensor:
    """Where each row's keys would start if they lay in one piece, [num_rows + 1] int32."""
    return torch.nn.functional.pad(rows.context_lens.cumsum(0, dtype=torch.int32), (1, 0))


def kernel_candidates(device: torch.device) -> Iterator[tuple[str, PagedKernel]]:
    """Name and kernel of everything that might page on this device, the best first."""
    if device.type != "cuda":
        return
    third = _find("flash_attn_interface", "flash_attn_with_kvcache")
    if third is not None:
        yield "FlashAttention 3", FlashAttention3(third)
    varlen = _find("torch.nn.attention.varlen", "varlen_attn")
    if varlen is not None:
        generation = _GENERATIONS.get(torch.cuda.get_device_capability(device)[0])
        if generation is not None and _activate(generation):
            yield f"torch's varlen with {generation}", TorchVarlen(varlen, has_key_starts=False)
            importlib.import_module("torch.nn.attention").restore_flash_attention_impl()
        for has_key_starts in (False, True):
            yield "torch's varlen", TorchVarlen(varlen, has_key_starts=has_key_starts)
    flash = _find("flash_attn", "flash_attn_varlen_func")
    if flash is not None:
        yield "flash-attn", FlashAttention(flash)


def _find(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except (ImportError, OSError):  # a package may be built for another torch
        return None


def _activate(generation: str) -> bool:
    """Let torch's attention call this generation's kernels; False where no package brings them."""
    attention = importlib.import_module("torch.nn.attention")
    activate = getattr(attention, "activate_flash_attention_impl", None)
    if activate is None:
        return False
    try:
        activate(generation)
    except Exception as error:  # noqa: BLE001 - each package has its own way to be absent
        logger.info("no %s here: %s", generation, error)
        return False
    return True
