"""Our compiled attention does what torch's operations do, whatever the shape."""

import shutil
from typing import Any

import pytest
import torch

from engine.gathered_attention import GatheredAttention
from engine.kv_cache import KVCache, KVCacheSpec
from engine.layer_attention import LayerAttention
from engine.native.library import load_library
from engine.native_attention import NativeAttention
from tests.unit.engine.paged_rows import make_schedule

TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.bfloat16: 4e-2,
    torch.float16: 4e-3,
}
# (heads, KV heads, width of queries and keys, width of values)
SHAPES = [(9, 3, 64, 64), (4, 4, 32, 32), (8, 1, 256, 256), (4, 2, 8, 8), (4, 2, 20, 12)]
EXTRAS: list[dict[str, Any]] = [
    {},
    {"window": 7},
    {"window": 100, "softcap": 30.0},
    {"sinks": True},
    {"sinks": True, "window": 33},
]
# (tokens of the step, context with them): decodes first, then chunks of all kinds.
ROWS = [(1, 1), (1, 70), (1, 200), (5, 5), (40, 150), (130, 130)]
NUM_LAYERS, LAYER = 3, 1

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None, reason="no C++ compiler on this machine"
)


@pytest.fixture(autouse=True)
def library() -> None:
    assert load_library(), "make setup builds it"


@pytest.mark.parametrize("block_size", [5, 32])
@pytest.mark.parametrize("extras", EXTRAS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_it_equals_attention_by_torch(
    dtype: torch.dtype, shape: tuple[int, ...], extras: dict[str, Any], block_size: int
):
    torch.manual_seed(0)
    heads, kv_heads, head_dim, value_dim = shape
    scheduled, num_blocks = make_schedule(ROWS, block_size)
    spec = KVCacheSpec(
        num_layers=NUM_LAYERS,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=str(dtype).removeprefix("torch."),
        device="cpu",
    )
    ours, theirs = KVCache(spec, num_blocks), KVCache(spec, num_blocks)
    ours.tensor.normal_()
    if value_dim < head_dim:
        ours.tensor[:, :, 1, ..., value_dim:] = 0  # as every write leaves it
    theirs.tensor.copy_(ours.tensor)
    num_tokens = sum(entry.num_tokens for entry in scheduled)
    query = torch.randn(num_tokens, heads, head_dim).to(dtype).transpose(0, 1)
    key = torch.randn(kv_heads, num_tokens, head_dim).to(dtype)
    value = torch.randn(kv_heads, num_tokens, value_dim).to(dtype)
    sinks = torch.randn(heads).to(dtype) if extras.get("sinks") else None
    layer = LayerAttention(
        LAYER, head_dim**-0.5, extras.get("window"), extras.get("softcap"), sinks
    )
    native = NativeAttention.plan(scheduled, ours).attend(layer, query, key, value)
    gathered = GatheredAttention.plan(scheduled, theirs).attend(layer, query, key, value)
    assert native.shape == gathered.shape == (num_tokens, heads, value_dim)
    assert (native.double() - gathered.double()).abs().max() <= TOLERANCES[dtype]
    assert torch.equal(ours.tensor, theirs.tensor)


def test_a_number_that_is_not_finite_stays_in_its_own_row():
    spec = KVCacheSpec(
        num_layers=1, num_kv_heads=2, head_dim=8, block_size=5, dtype="float32", device="cpu"
    )
    scheduled, num_blocks = make_schedule(ROWS, block_size=5)
    cache = KVCache(spec, num_blocks)
    num_tokens = sum(entry.num_tokens for entry in scheduled)
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, num_tokens, 8) for _ in range(3))
    layer = LayerAttention(0, 1.0)
    clean = NativeAttention.plan(scheduled, cache).attend(layer, query, key, value).clone()
    query[:, 1] = float("nan")
    torn = NativeAttention.plan(scheduled, cache).attend(layer, query, key, value)
    others = [n for n in range(num_tokens) if n != 1]
    assert torch.equal(torn[others], clean[others])
    assert not torch.isfinite(torn[1]).any()
