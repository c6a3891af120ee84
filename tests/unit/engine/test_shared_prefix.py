"""Requests whose first blocks are the same share their reading, each to the bits of alone."""

import shutil
from typing import Any

import pytest
import torch

from engine.native.library import load_library
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.schedule import ScheduledRequest
from tests.unit.engine.test_narrow_cache import (
    EXTRAS,
    SHAPES,
    attend,
    make_cache,
    make_heads,
    make_layer,
    needs_tiles,
)

# (name of the prefix, tokens of it, tokens behind it, tokens of the step): whole blocks of the
# prefix are shared with all of that name.
Row = tuple[str, int, int, int]
BATCHES: dict[str, list[Row]] = {
    "one prefix": [("a", 200, 1 + 13 * n, 1) for n in range(16)],
    "one prefix of many": [("a", 150, 1 + n % 7, 1) for n in range(40)],
    "a short one of all, long ones of some": [
        *[("a", 400, 20 + n, 1) for n in range(3)],
        *[("a", 90, 500 + n, 1) for n in range(2)],
        *[("a", 330, 3, 1) for _ in range(4)],
    ],
    "two, and others": [
        ("a", 200, 9, 1),
        ("b", 137, 70, 1),
        ("c", 300, 1, 1),
        ("a", 190, 66, 1),
        ("b", 137, 1, 1),
        ("a", 64, 1, 1),
        ("b", 128, 40, 25),
    ],
}

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None, reason="no C++ compiler on this machine"
)


@pytest.fixture(autouse=True)
def library() -> None:
    assert load_library(), "make setup builds it"
    torch.manual_seed(0)


def make_rows(rows: list[Row], block_size: int) -> tuple[list[ScheduledRequest], int]:
    """Their requests, blocks in a random order; how many blocks."""
    longest = {name: max(each[1] for each in rows if each[0] == name) for name, *_ in rows}
    num_blocks = sum(-(-(prefix + own) // block_size) for _, prefix, own, _ in rows)
    num_blocks += sum(-(-length // block_size) for length in longest.values())
    free = iter(torch.randperm(num_blocks).tolist())
    prefixes = {name: [next(free) for _ in range(n // block_size)] for name, n in longest.items()}
    scheduled = []
    for number, (name, prefix, own, num_tokens) in enumerate(rows):
        context = prefix + own
        request = Request(
            request_id=str(number),
            token_ids=[0] * context,
            num_prompt_tokens=context,
            sampling_params=SamplingParams(max_tokens=1),
        )
        shared = prefixes[name][: prefix // block_size]
        count = -(-context // block_size) - len(shared)
        request.block_ids = [*shared, *(next(free) for _ in range(count))]
        scheduled.append(ScheduledRequest(request=request, start=context - num_tokens, end=context))
    return scheduled, num_blocks


@needs_tiles
@pytest.mark.parametrize("block_size", [5, 16, 32, 48])
@pytest.mark.parametrize("extras", EXTRAS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_a_row_is_computed_alike_alone_and_with_those_that_share_its_prefix(
    batch: str, shape: tuple[int, ...], extras: dict[str, Any], block_size: int
):
    scheduled, num_blocks = make_rows(BATCHES[batch], block_size)
    cache = make_cache(shape, block_size, num_blocks, "bfloat16")
    heads = make_heads(shape, sum(entry.num_tokens for entry in scheduled))
    layer = make_layer(shape, extras)
    together = attend(scheduled, cache, layer, heads)
    assert torch.isfinite(together).all()
    start = 0
    for entry in scheduled:
        end = start + entry.num_tokens
        own = [each[:, start:end] for each in heads]
        assert torch.equal(attend([entry], cache, layer, own), together[start:end])
        start = end
