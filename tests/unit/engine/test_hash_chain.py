"""The compiled chain of digests is hashlib's, whatever is hashed."""

import hashlib
import os
import shutil
import sys
import sysconfig
from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import block_hash
from engine.block_hash import BlockHash, hash_blocks, joined_hashes, pack_tokens
from engine.native.hash_chain import LIBRARY, load_hash_chain, load_token_packer
from engine.native.library_file import cpu_flags
from engine.native.plain_library import PlainLibrary

HAS_SHA = set(cpu_flags().split()) >= LIBRARY.cpu_flags
HAS_HEADERS = Path(sysconfig.get_path("include"), "Python.h").exists()
PARENT = hashlib.sha256(b"parent").digest()

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None or not HAS_SHA, reason="no C++ compiler, or no SHA instructions"
)


@pytest.fixture(autouse=True)
def library() -> None:
    assert load_hash_chain(), "make setup builds it"
    assert load_token_packer() or not HAS_HEADERS, "make setup builds it"


def one_by_one(parent: bytes, packed: bytes, size: int) -> bytes:
    digests, last = b"", parent
    for start in range(0, len(packed) - size + 1, size):
        last = hashlib.sha256(last + packed[start : start + size]).digest()
        digests += last
    return digests


def test_each_size_of_block_is_padded_rightly() -> None:
    for num_tokens in range(1, 150):
        packed = os.urandom(3 * 4 * num_tokens + 3)
        found = joined_hashes(packed, block_size=num_tokens, parent=BlockHash(PARENT))
        assert found == one_by_one(PARENT, packed, 4 * num_tokens), num_tokens
        assert len(found) == 3 * 32


@given(st.binary(min_size=32, max_size=32), st.binary(max_size=700), st.integers(1, 40))
def test_any_chain_is_that_of_hashlib(parent: bytes, packed: bytes, block_size: int) -> None:
    found = joined_hashes(packed, block_size=block_size, parent=BlockHash(parent))
    assert found == one_by_one(parent, packed, 4 * block_size)


@pytest.mark.parametrize("root", [b"", b"short", bytes(33)])
def test_a_root_of_another_length_is_hashed_whole(root: bytes) -> None:
    packed = bytes(range(32))
    found = joined_hashes(packed, block_size=4, parent=BlockHash(root))
    assert found == one_by_one(root, packed, 16)


def test_without_the_library_the_digests_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = list(range(300))
    compiled = hash_blocks(tokens, block_size=16, root=BlockHash(PARENT))
    monkeypatch.setattr(block_hash, "load_hash_chain", lambda: None)
    assert hash_blocks(tokens, block_size=16, root=BlockHash(PARENT)) == compiled
    assert len(compiled) == 18


def test_a_cpu_without_the_instructions_runs_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.native.plain_library.cpu_flags", lambda: "fpu ssse3 sse4_1 avx2")
    assert load_hash_chain.__wrapped__() is None


def test_no_library_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(PlainLibrary, "path", lambda library: tmp_path / "none.so")
    assert load_hash_chain.__wrapped__() is None
    assert load_token_packer.__wrapped__() is None


class Seven:
    def __index__(self) -> int:
        return 7


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_packed_tokens_are_those_of_an_array(tokens: list[int]) -> None:
    assert pack_tokens(tokens) == array("I", tokens).tobytes()


def test_what_counts_as_an_int_is_packed() -> None:
    tokens = [True, Seven(), np.int64(3), 2**30, 2**30 - 1, 0]
    packed = pack_tokens(tokens)  # type: ignore[arg-type]
    assert packed == array("I", [1, 7, 3, 2**30, 2**30 - 1, 0]).tobytes()
    assert pack_tokens(tuple(range(9))) == array("I", range(9)).tobytes()


@pytest.mark.parametrize("token", [-1, -(2**40), 2**32, 2**64, "7", 7.0, None])
def test_what_is_no_token_is_refused_and_nothing_leaks(token: object) -> None:
    tokens = [1, token]
    with pytest.raises((OverflowError, TypeError)) as expected:
        array("I", tokens)  # type: ignore[arg-type]
    references = sys.getrefcount(token)
    for _ in range(3):
        with pytest.raises(expected.type):
            pack_tokens(tokens)  # type: ignore[arg-type]
    assert sys.getrefcount(token) <= references + 1
