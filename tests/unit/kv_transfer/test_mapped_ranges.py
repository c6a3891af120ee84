"""Ranges over shared memory: which bytes of the peer's blocks land where in ours."""

from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from kv_transfer.backend import LinkBrokenError
from kv_transfer.layout import KVLayout
from kv_transfer.mapped_ranges import MappedRanges
from kv_transfer.pool_blocks import PoolBlocks
from kv_transfer.range_mover import RangeOrder
from tests.unit.kv_transfer.fakes import make_layout, make_pool, tokens_of

NUM_BLOCKS = 16


@pytest.fixture(params=[0, 1 << 40], ids=["past the caches", "by numpy"], autouse=True)
def past_caches_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.mapped_ranges.PAST_CACHES_BYTES", request.param)


class Mapped:
    """A link over which the peer's pool is mapped."""

    def __init__(self, pool: torch.Tensor) -> None:
        self.shared_memory = self
        self.aborted = ""
        self._pages = pool.view(torch.uint8).view(-1).numpy()

    def rows(self, theirs: KVLayout) -> np.ndarray:
        return self._pages.reshape(-1, theirs.rows_per_block, theirs.bytes_per_row)

    def abort(self, reason: str) -> None:
        self.aborted = reason


def receive(
    p_block: int,
    d_block: int,
    start: int,
    end: int,
    *,
    source_ids: Sequence[int],
    target_ids: Sequence[int],
    is_wanted: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy tokens [start, end); returns both pools."""
    ours, theirs = make_layout(d_block), make_layout(p_block)
    source, target = make_pool(theirs, NUM_BLOCKS, seed=3), make_pool(ours, NUM_BLOCKS)
    order = RangeOrder(
        block_ids=target_ids,
        token_start=start,
        token_end=end,
        timeout_s=1.0,
        lent=source_ids[start // p_block : -(-end // p_block)],
    )
    ranges = MappedRanges(PoolBlocks(target, ours), theirs=theirs)
    num_bytes = ranges.receive_range(Mapped(source), order, alter=None, is_wanted=is_wanted)
    assert num_bytes == (end - start) * ours.bytes_per_token
    return source, target


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # one value for all
@given(
    p_block=st.sampled_from([2, 3, 4]),
    d_block=st.sampled_from([2, 3, 4]),
    start=st.integers(0, 20),
    length=st.integers(1, 12),
    shuffle=st.randoms(use_true_random=False),
)
def test_every_token_arrives_and_no_other_block_is_touched(
    p_block: int, d_block: int, start: int, length: int, shuffle
) -> None:
    end = start + length
    source_ids, target_ids = list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS))
    if shuffle.random() < 0.7:  # else they lie side by side
        shuffle.shuffle(source_ids)
        shuffle.shuffle(target_ids)
    source, target = receive(
        p_block, d_block, start, end, source_ids=source_ids, target_ids=target_ids
    )
    sent = tokens_of(source, source_ids, end)[start:]
    arrived = tokens_of(target, target_ids, end)
    assert torch.equal(arrived[start:], sent)
    assert not bool(arrived[:start].any()), "what was there before the range is not ours to write"
    behind = target_ids[-(-end // d_block) :]
    assert not bool(target[behind].any()), "blocks behind the range belong to nobody"


@pytest.mark.parametrize(("end", "is_whole"), [(9, False), (10, True), (12, True)])
def test_a_last_block_is_copied_whole_when_half_of_it_is_meant(end: int, is_whole: bool) -> None:
    source, target = receive(4, 4, 0, end, source_ids=[7, 2, 9], target_ids=[3, 11, 5])
    assert torch.equal(target[5], source[9]) is is_whole


def test_what_nobody_wants_any_more_is_not_copied() -> None:
    ids = [1, 2, 3]
    _, target = receive(4, 4, 0, 12, source_ids=ids, target_ids=ids, is_wanted=False)
    assert not bool(target.any())


@pytest.mark.parametrize(
    "lent", [[1, NUM_BLOCKS], [1], [1, 2, 3], []], ids=["unknown", "few", "many", "none"]
)
def test_blocks_that_cannot_hold_the_range_end_the_link(lent: Sequence[int]) -> None:
    layout = make_layout(4)
    link = Mapped(make_pool(layout, NUM_BLOCKS, seed=3))
    ranges = MappedRanges(PoolBlocks(make_pool(layout, NUM_BLOCKS), layout), theirs=layout)
    order = RangeOrder(block_ids=[0, 1], token_start=0, token_end=8, timeout_s=1.0, lent=lent)
    with pytest.raises(LinkBrokenError, match="no sense"):
        ranges.receive_range(link, order, alter=None, is_wanted=True)
    assert link.aborted
