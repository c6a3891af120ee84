"""The compiled copy of rows is numpy's, wherever they lie."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.native.library_file import cpu_flags
from engine.native.plain_library import PlainLibrary
from engine.native.row_copy import LIBRARY, Rows, load_row_copy

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None or not set(cpu_flags().split()) >= LIBRARY.cpu_flags,
    reason="no C++ compiler, or not its instructions",
)
LINE = 64


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, int], tuple[int, int], int, int]:
    """Offset, bytes from row to row, of target and source; then the rows and their bytes."""
    unit = draw(st.sampled_from([1, 8, LINE]))
    num_rows, width = draw(st.integers(1, 11)), unit * draw(st.integers(1, 9))
    places = [
        (unit * draw(st.integers(0, 3)), width + unit * draw(st.integers(0, 3))) for _ in "ab"
    ]
    return places[0], places[1], num_rows, width


def rows_of(memory: Rows, place: tuple[int, int], num_rows: int, width: int) -> Rows:
    offset, step = place
    return memory[offset : offset + num_rows * step].reshape(num_rows, step)[:, :width]


@given(st.lists(views(), max_size=4))
def test_rows_land_where_they_belong_and_nothing_beside_them_changes(cases: list) -> None:
    copy_rows = load_row_copy()
    assert copy_rows, "make setup builds it"
    random = np.random.default_rng(7)
    pairs, expected, memories = [], [], []
    for target_place, source_place, num_rows, width in cases:
        memory = _memory()
        source = rows_of(
            random.integers(1, 256, len(memory), np.uint8), source_place, num_rows, width
        )
        wanted = memory.copy()
        np.copyto(rows_of(wanted, target_place, num_rows, width), source)
        pairs.append((rows_of(memory, target_place, num_rows, width), source))
        expected.append(wanted)
        memories.append(memory)
    copy_rows(pairs)
    for memory, wanted in zip(memories, expected, strict=True):
        assert np.array_equal(memory, wanted)


def _memory() -> Rows:
    """Zeros that begin with a line."""
    memory = np.zeros((1 << 14) + LINE, np.uint8)
    return memory[-memory.ctypes.data % LINE :][: 1 << 14]


def test_a_cpu_without_the_instructions_runs_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.native.plain_library.cpu_flags", lambda: "fpu sse4_1 avx")
    assert load_row_copy.__wrapped__() is None


def test_no_library_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(PlainLibrary, "path", lambda library: tmp_path / "none.so")
    assert load_row_copy.__wrapped__() is None
