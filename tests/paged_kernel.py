"""A kernel over blocks in plain torch, for tests where no device brings one."""

from collections.abc import Iterator

import pytest
import torch

from engine.layer_attention import LayerAttention
from engine.paged import proof
from engine.paged.kernel import PagedKernel, PagedRows


def reference_kernel(
    layer: LayerAttention,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: PagedRows,
) -> torch.Tensor:
    """Row by row, as slow as it is plain."""
    starts, lens = rows.row_starts.tolist(), rows.context_lens.tolist()
    assert len(lens) == len(rows.block_table) == len(starts) - 1
    output = torch.full_like(query, float("nan"))
    for row, (start, end, context_len) in enumerate(
        zip(starts[:-1], starts[1:], lens, strict=True)
    ):
        assert end - start <= rows.max_row_tokens
        assert context_len <= rows.max_context_len
        num_blocks = -(-context_len // keys.shape[1])
        own = rows.block_table[row, :num_blocks].long()
        key = keys[own].flatten(0, 1)[:context_len]  # [context_len, num_kv_heads, head_dim]
        value = values[own].flatten(0, 1)[:context_len]
        group = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(group, dim=1) for heads in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[start:end], key) * layer.scaling
        behind = torch.arange(context_len - (end - start), context_len)[:, None] - torch.arange(
            context_len
        )
        is_hidden = behind < 0
        if layer.window is not None:
            is_hidden |= behind >= layer.window
        weights = scores.masked_fill(is_hidden, float("-inf")).softmax(dim=-1)
        output[start:end] = torch.einsum("hqk,khd->qhd", weights, value)
    return output


def offer_kernel(monkeypatch: pytest.MonkeyPatch, kernel: PagedKernel = reference_kernel) -> None:
    """Let engines with `attention="paged"` find this kernel on a CPU."""

    def candidates(_: torch.device) -> Iterator[tuple[str, PagedKernel]]:
        yield "the test's", kernel

    monkeypatch.setattr(proof, "kernel_candidates", candidates)
