"""Ranges, pieces, compatibility, and copies between pools of unequal block size."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.digest import range_digest
from kv_transfer.layout import RangeCutter, block_range, incompatibility
from kv_transfer.pool_blocks import block_parts
from tests.unit.kv_transfer.fakes import make_layout, make_pool, tokens_of


@given(
    start=st.integers(0, 200),
    length=st.integers(1, 200),
    block_size=st.integers(1, 40),
    peer_block_size=st.one_of(st.none(), st.integers(1, 40)),
    max_bytes=st.integers(1, 100_000),
)
def test_pieces_cover_the_range_once_and_both_sides_cut_alike(
    start, length, block_size, peer_block_size, max_bytes
) -> None:
    layout = make_layout(block_size)
    peer_block_size = peer_block_size or block_size
    can_use_slabs = peer_block_size == block_size
    theirs = make_layout(peer_block_size)
    end = start + length
    pieces, same_pieces = (
        RangeCutter(one, peer_block_size=other, max_bytes=max_bytes).cut(start, end)
        for one, other in ((layout, peer_block_size), (theirs, block_size))
    )
    assert pieces == same_pieces
    assert [p.as_slabs for p in pieces] == sorted(p.as_slabs for p in pieces)
    pieces.sort(key=lambda piece: piece.token_start)
    assert pieces[0].token_start == start
    # only a slab goes on to the end of its block, and only when half of it is meant
    num_more = pieces[-1].token_end - end
    assert num_more == 0 or (pieces[-1].as_slabs and 0 < 2 * num_more <= block_size)
    for before, after in itertools.pairwise(pieces):
        assert before.token_end == after.token_start
    for piece in pieces:
        unit = layout.bytes_per_block if piece.as_slabs else layout.bytes_per_token
        assert piece.num_bytes == (piece.token_end - piece.token_start) * layout.bytes_per_token
        assert 0 < piece.num_bytes <= max(max_bytes, unit)
        if piece.as_slabs:
            assert piece.token_start % block_size == piece.token_end % block_size == 0
    slab_tokens = sum(p.token_end - p.token_start for p in pieces if p.as_slabs)
    first, last = -(-start // block_size), (end + block_size / 2) // block_size
    assert slab_tokens == (max(last - first, 0) * block_size if can_use_slabs else 0)


@given(start=st.integers(0, 50), length=st.integers(1, 50), block_size=st.integers(1, 9))
def test_views_and_digests_do_not_depend_on_the_block_size(start, length, block_size) -> None:
    tokens = make_pool(make_layout(1), 100, seed=length)
    pool = make_pool(make_layout(block_size), 100)
    one_token_ids = list(range(100))
    block_ids = list(reversed(range(100)))
    end = start + length
    for (_, _, source), token in zip(
        block_parts(tokens, one_token_ids, start, end), range(start, end), strict=True
    ):
        for _, _, target in block_parts(pool, block_ids, token, token + 1):
            target.copy_(source)
    assert torch.equal(
        tokens_of(tokens, one_token_ids, end)[start:], tokens_of(pool, block_ids, end)[start:]
    )
    assert range_digest(tokens, one_token_ids, start, end) == range_digest(
        pool, block_ids, start, end
    )
    first, last = block_range(start, end, block_size)
    assert len(list(block_parts(pool, block_ids, start, end))) == last - first


def test_only_the_block_size_may_differ() -> None:
    assert incompatibility(make_layout(4), make_layout(8)) is None
    reason = incompatibility(make_layout(4), make_layout(4, model_id="other", dtype="bfloat16"))
    assert reason == "model_id: 'tiny' here, 'other' there; dtype: 'float32' here, 'bfloat16' there"


def test_sizes() -> None:
    layout = make_layout(4)
    assert layout.bytes_per_token == 2 * 2 * 2 * 4 * 4
    assert layout.num_blocks(0) == 0
    assert layout.num_blocks(9) == 3


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("layout_version", 99),
        ("model_id", "another"),
        ("model_revision", "2"),
        ("dtype", "bfloat16"),
        ("num_layers", 3),
        ("num_kv_heads", 1),
        ("head_dim", 8),
        ("hash_scheme", "another"),
    ],
)
def test_everything_else_unequal_is_incompatible_with_its_reason(field, other) -> None:
    ours, theirs = make_layout(4), make_layout(8, **{field: other})
    expected = f"{field}: {getattr(ours, field)!r} here, {other!r} there"
    assert incompatibility(ours, theirs) == expected
