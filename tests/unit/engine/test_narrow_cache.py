"""Compiled attention of float32 numbers over a cache of 16 bits: near float64, and always alike."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from engine.gathered_attention import GatheredAttention
from engine.kv_cache import KVCache, KVCacheSpec
from engine.layer_attention import LayerAttention
from engine.native.library import load_library
from engine.native.library_file import cpu_flags
from engine.native_attention import NativeAttention
from engine.schedule import ScheduledRequest
from tests.unit.engine.paged_rows import make_schedule

# (heads, KV heads, width of queries and keys, width of values)
SHAPES = [
    (9, 3, 64, 64),
    (4, 4, 32, 32),
    (8, 1, 256, 256),
    (4, 2, 96, 48),
    (34, 2, 64, 64),
    # Widths that do not fill their tiles.
    (4, 2, 20, 12),
    (4, 1, 40, 40),
    (4, 4, 80, 80),
]
EXTRAS: list[dict[str, Any]] = [
    {},
    {"window": 7},
    {"window": 100, "softcap": 3.0},
    {"sinks": True},
    {"sinks": True, "window": 33},
]
# (tokens of the step, context with them): decodes, chunks behind a prefix, prompts.
ROWS = [(1, 1), (1, 70), (1, 200), (5, 5), (40, 150), (130, 130)]
LAYER = 1

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None, reason="no C++ compiler on this machine"
)
needs_tiles = pytest.mark.skipif(
    "amx_bf16" not in cpu_flags().split(), reason="no tiles of bfloat16 numbers on this CPU"
)


@pytest.fixture(autouse=True)
def library() -> None:
    assert load_library(), "make setup builds it"
    torch.manual_seed(0)


def make_cache(shape: tuple[int, ...], block_size: int, num_blocks: int, dtype: str) -> KVCache:
    """Full of numbers, as every write leaves them."""
    _, kv_heads, head_dim, value_dim = shape
    spec = KVCacheSpec(
        num_layers=3,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device="cpu",
    )
    cache = KVCache(spec, num_blocks)
    cache.tensor.normal_()
    cache.tensor[:, :, 1, ..., value_dim:] = 0
    return cache


def make_heads(shape: tuple[int, ...], num_tokens: int) -> list[torch.Tensor]:
    """Queries, keys and values, each [heads, num_tokens, width]."""
    heads, kv_heads, head_dim, value_dim = shape
    widths = [(heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim)]
    return [torch.randn(number, num_tokens, width) for number, width in widths]


def make_layer(shape: tuple[int, ...], extras: dict[str, Any]) -> LayerAttention:
    sinks = torch.randn(shape[0]) if extras.get("sinks") else None
    return LayerAttention(
        LAYER, shape[2] ** -0.5, extras.get("window"), extras.get("softcap"), sinks
    )


def attend(
    scheduled: Sequence[ScheduledRequest],
    cache: KVCache,
    layer: LayerAttention,
    heads: list[torch.Tensor],
) -> torch.Tensor:
    return NativeAttention.plan(scheduled, cache).attend(layer, *heads)


@pytest.mark.parametrize("block_size", [5, 32, 48])
@pytest.mark.parametrize("extras", EXTRAS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_comes_near_attention_in_float64_over_what_the_cache_holds(
    dtype: torch.dtype, shape: tuple[int, ...], extras: dict[str, Any], block_size: int
):
    scheduled, num_blocks = make_schedule(ROWS, block_size)
    ours = make_cache(shape, block_size, num_blocks, str(dtype).removeprefix("torch."))
    theirs = KVCache(replace(ours.spec, dtype="float64"), num_blocks)
    theirs.tensor.copy_(ours.tensor)
    query, key, value = make_heads(shape, sum(entry.num_tokens for entry in scheduled))
    layer = make_layer(shape, extras)
    attended = attend(scheduled, ours, layer, [query, key, value])
    exact = GatheredAttention.plan(scheduled, theirs).attend(
        layer, query.double(), key.to(dtype).double(), value.to(dtype).double()
    )
    assert attended.dtype == torch.float32
    assert torch.equal(ours.tensor.double(), theirs.tensor)
    error = (attended.double() - exact).abs() / exact.abs().max()
    rounds = dtype == torch.bfloat16  # queries and weights, where tiles are
    assert error.max() <= (1e-2 if rounds else 1e-5)
    assert error.mean() <= (4e-4 if rounds else 1e-6)


@needs_tiles
@pytest.mark.parametrize("block_size", [5, 16, 32])
@pytest.mark.parametrize("extras", EXTRAS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_token_is_computed_alike_alone_in_a_batch_and_however_its_prompt_is_cut(
    shape: tuple[int, ...], extras: dict[str, Any], block_size: int
):
    context = 300
    rows = [(context, context), (1, 90), (70, 70)]
    (whole, *others), num_blocks = make_schedule(rows, block_size)
    cache = make_cache(shape, block_size, num_blocks, "bfloat16")
    heads, layer = make_heads(shape, sum(num for num, _ in rows)), make_layer(shape, extras)
    together = attend([whole, *others], cache, layer, heads)
    for cuts in ([0, 300], [0, 1, 18, 31, 64, 190, 298, 299, 300], range(0, 301, 10)):
        for start, end in pairwise(cuts):
            part = replace(whole, start=start, end=end)
            own = [each[:, start:end] for each in heads]
            assert torch.equal(attend([part], cache, layer, own), together[start:end])


@pytest.mark.parametrize("block_size", [5, 32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_an_earlier_owner_left_in_a_block_does_no_harm(
    shape: tuple[int, ...], block_size: int
):
    rows = [(context, context) for context in (1, 7, 31, 33, 66, 130)]
    scheduled, num_blocks = make_schedule(rows, block_size)
    cache = make_cache(shape, block_size, num_blocks, "bfloat16")
    heads, layer = make_heads(shape, sum(num for num, _ in rows)), make_layer(shape, {})
    clean = attend(scheduled, cache, layer, heads)
    cache.tensor.fill_(float("nan"))
    assert torch.equal(attend(scheduled, cache, layer, heads), clean)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[5]], ids=str)
def test_a_number_that_is_not_finite_stays_in_its_own_row(shape: tuple[int, ...]):
    scheduled, num_blocks = make_schedule(ROWS, block_size=32)
    cache = make_cache(shape, 32, num_blocks, "bfloat16")
    query, key, value = make_heads(shape, sum(num for num, _ in ROWS))
    clean = attend(scheduled, cache, make_layer(shape, {}), [query, key, value])
    row = 20  # among the queries of a chunk
    query[:, row] = float("nan")
    torn = attend(scheduled, cache, make_layer(shape, {}), [query, key, value])
    others = [n for n in range(len(clean)) if n != row]
    assert torch.equal(torn[others], clean[others])
    assert not torch.isfinite(torn[row]).any()
