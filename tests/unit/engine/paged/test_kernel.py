"""Which kernel reads the blocks: the first that was seen to be right."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.kv_cache import KVCacheSpec
from engine.layer_attention import LayerAttention
from engine.paged import kernel as kernel_module
from engine.paged import proof
from engine.paged.kernel import (
    FlashAttention,
    FlashAttention3,
    PagedKernel,
    PagedRows,
    TorchVarlen,
    kernel_candidates,
)
from tests.paged_kernel import offer_kernel, reference_kernel

SPEC = KVCacheSpec(
    num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32", device="cpu"
)


def varlen_like(query: torch.Tensor, keys: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
    """What torch documents of `varlen_attn` with a block table, by the reference."""
    values, row_starts, key_starts, max_row_tokens, max_context_len = rest
    assert more.keys() == {"scale", "window_size", "enable_gqa", "seqused_k", "block_table"}
    assert more["enable_gqa"] == (query.shape[1] != keys.shape[2])
    assert key_starts is None
    assert {more["seqused_k"].dtype, more["block_table"].dtype, row_starts.dtype} == {torch.int32}
    left, right = more["window_size"]
    assert right == 0
    layer = LayerAttention(0, more["scale"], None if left < 0 else left + 1)
    rows = PagedRows(
        row_starts=row_starts,
        context_lens=more["seqused_k"],
        block_table=more["block_table"],
        max_row_tokens=max_row_tokens,
        max_context_len=max_context_len,
    )
    return reference_kernel(layer, query, keys, values, rows)


def flash_like(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **more: Any):
    """The same for flash-attn's function, which takes its lengths from where keys start."""
    lens = more["cu_seqlens_k"].diff()
    assert more["cu_seqlens_k"].dtype is torch.int32
    assert more["causal"]
    return varlen_like(
        query,
        keys,
        values,
        more["cu_seqlens_q"],
        None,
        more["max_seqlen_q"],
        more["max_seqlen_k"],
        scale=more["softmax_scale"],
        window_size=more["window_size"],
        enable_gqa=query.shape[1] != keys.shape[2],
        seqused_k=lens,
        block_table=more["block_table"],
    )


def kvcache_like(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **more: Any):
    """The same for FlashAttention 3's function over a cache."""
    assert more["causal"]
    return varlen_like(
        query,
        keys,
        values,
        more["cu_seqlens_q"],
        None,
        more["max_seqlen_q"],
        keys.shape[0] * keys.shape[1],
        scale=more["softmax_scale"],
        window_size=more["window_size"],
        enable_gqa=query.shape[1] != keys.shape[2],
        seqused_k=more["cache_seqlens"],
        block_table=more["page_table"],
    )


def broken(*_: Any) -> torch.Tensor:
    raise RuntimeError("Paged KV cache block size must be divisible by 256\nand so on")


def spoilt(factor: float) -> Callable[..., torch.Tensor]:
    return lambda *arguments: reference_kernel(*arguments) * factor


@pytest.mark.parametrize(
    "kernel",
    [
        reference_kernel,
        TorchVarlen(varlen_like, has_key_starts=False),
        FlashAttention(flash_like),
        FlashAttention3(kvcache_like),
    ],
    ids=["reference", "torch", "flash-attn", "flash-attn 3"],
)
@pytest.mark.parametrize("block_size", [1, 4, 32])
@pytest.mark.parametrize("window", [None, 3])
def test_a_right_kernel_is_taken(
    monkeypatch: pytest.MonkeyPatch, kernel: PagedKernel, block_size: int, window: int | None
):
    spec = KVCacheSpec(
        num_layers=3,
        num_kv_heads=2,
        head_dim=8,
        block_size=block_size,
        dtype="float32",
        device="cpu",
    )
    offer_kernel(monkeypatch, kernel)
    for num_heads in (2, 6):
        assert proof.find_kernel(spec, num_heads=num_heads, windows=(None, window)) is kernel


def test_the_first_that_is_right_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def candidates(_: torch.device) -> Iterator[tuple[str, PagedKernel]]:
        yield "broken", broken
        yield "wrong", spoilt(1.1)
        yield "nothing", spoilt(float("nan"))
        yield "right", reference_kernel
        raise AssertionError("nobody is asked after it")

    monkeypatch.setattr(proof, "kernel_candidates", candidates)
    with caplog.at_level("INFO", logger="engine.paged.proof"):
        assert proof.find_kernel(SPEC, num_heads=4, windows=(None,)) is reference_kernel
    assert "broken cannot page here: Paged KV cache block size must be" in caplog.text
    assert "and so on" not in caplog.text
    assert "wrong pages wrongly here" in caplog.text
    assert "nothing pages wrongly here, off by inf" in caplog.text


def test_a_kernel_that_forgets_the_window_is_not_taken(monkeypatch: pytest.MonkeyPatch):
    def forgetful(layer: LayerAttention, *arguments: Any) -> torch.Tensor:
        return reference_kernel(LayerAttention(layer.index, layer.scaling), *arguments)

    offer_kernel(monkeypatch, forgetful)
    assert proof.find_kernel(SPEC, num_heads=4, windows=(None,)) is forgetful
    assert proof.find_kernel(SPEC, num_heads=4, windows=(None, 1000)) is None


@pytest.mark.parametrize(
    ("packages", "major", "names"),
    [
        ({"torch.nn.attention.varlen"}, 8, ["torch's varlen", "torch's varlen"]),
        ({"flash_attn"}, 8, ["flash-attn"]),
        (
            {"torch.nn.attention.varlen", "flash_attn_interface", "flash_attn"},
            9,
            [
                "FlashAttention 3",
                "torch's varlen with FA3",
                "torch's varlen",
                "torch's varlen",
                "flash-attn",
            ],
        ),
        (set(), 9, []),
    ],
)
def test_what_there_is_is_offered_and_torch_put_back_as_it_was(
    monkeypatch: pytest.MonkeyPatch, packages: set[str], major: int, names: list[str]
):
    active: list[str] = []

    def activate(generation: str) -> None:
        if (generation, "flash_attn_interface" in packages) != ("FA3", True):
            raise ModuleNotFoundError("No module named 'flash_attn_interface'")
        active.append(generation)

    def find(module: str, name: str) -> str | None:
        return name if module in packages else None

    monkeypatch.setattr(kernel_module, "_find", find)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    attention = torch.nn.attention
    monkeypatch.setattr(attention, "activate_flash_attention_impl", activate, raising=False)
    monkeypatch.setattr(attention, "restore_flash_attention_impl", active.clear, raising=False)
    offered = []
    for name, _ in kernel_candidates(torch.device("cuda:0")):
        offered.append(name)
        assert bool(active) == name.endswith("with FA3")
    assert offered == names


def test_there_is_none_on_a_cpu():
    assert proof.find_kernel(SPEC, num_heads=4, windows=(None,)) is None


def test_torch_takes_our_blocks_as_they_lie():
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    with FakeTensorMode():

        def tensor(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype)

        pool = tensor(9, 3, 2, 32, 2, 64, dtype=torch.bfloat16)
        query = tensor(7, 4, 64, dtype=torch.bfloat16)
        rows = PagedRows(
            row_starts=tensor(4),
            context_lens=tensor(3),
            block_table=tensor(3, 5),
            max_row_tokens=5,
            max_context_len=99,
        )
        for layer in (LayerAttention(1, 0.1), LayerAttention(2, 0.1, 16)):
            for has_key_starts in (False, True):
                kernel = TorchVarlen(varlen.varlen_attn, has_key_starts=has_key_starts)
                output = kernel(
                    layer, query, pool[:, layer.index, 0], pool[:, layer.index, 1], rows
                )
                assert output.shape == query.shape
