"""Block hashes: equal everywhere, different wherever content or salt differs."""

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from engine.block_hash import hash_block, hash_blocks, hash_root, salted_root

PROGRAM = """
from engine.block_hash import *
root = salted_root(hash_root(model_id="m", model_revision="", dtype="float32", block_size=4,
                             layout_version=1), "salt")
print([h.hex() for h in hash_blocks(list(range(13)), block_size=4, root=root)])
"""


def make_root(**changes: object) -> bytes:
    facts = {
        "model_id": "m",
        "model_revision": "",
        "dtype": "float32",
        "block_size": 4,
        "layout_version": 1,
    }
    return hash_root(**{**facts, **changes})  # type: ignore[arg-type]


def test_hashes_agree_between_processes_with_different_hash_seeds():
    printed = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1234")
    }
    assert len(printed) == 1
    assert len(next(iter(printed))) > 3 * 64


def test_only_full_blocks_have_a_hash():
    root = make_root()
    for length, count in ((0, 0), (3, 0), (4, 1), (5, 1), (8, 2)):
        assert len(hash_blocks(list(range(length)), block_size=4, root=root)) == count


def test_a_chain_is_block_hash_after_block_hash():
    root = make_root()
    first = hash_block(root, [1, 2, 3, 4])
    assert hash_blocks([1, 2, 3, 4, 5, 6, 7, 8], block_size=4, root=root) == [
        first,
        hash_block(first, [5, 6, 7, 8]),
    ]


def test_every_fact_sets_the_root_apart():
    changes = [
        {},
        {"model_id": "n"},
        {"model_revision": "r"},
        {"dtype": "bfloat16"},
        {"block_size": 8},
        {"layout_version": 2},
        {"rope_variant": "yarn"},
        {"lora": "a"},
        {"model_id": "", "model_revision": "m"},
    ]
    assert len({make_root(**change) for change in changes}) == len(changes)


def test_an_empty_salt_is_no_salt():
    root = make_root()
    assert salted_root(root, "") == root
    assert len({root, salted_root(root, "a"), salted_root(root, "b")}) == 3


@given(st.lists(st.integers(0, 300_000), max_size=40), st.integers(0, 39))
def test_a_changed_token_changes_its_block_and_all_after_it(token_ids, place):
    root = make_root()
    before = hash_blocks(token_ids, block_size=4, root=root)
    if place >= len(token_ids):
        return
    changed = [*token_ids[:place], token_ids[place] + 1, *token_ids[place + 1 :]]
    after = hash_blocks(changed, block_size=4, root=root)
    assert [a == b for a, b in zip(before, after, strict=True)] == [
        number < place // 4 for number in range(len(before))
    ]
