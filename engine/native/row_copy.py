"""Copies of many rows of bytes in one call, past the caches and without the interpreter's lock."""

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from engine.native.plain_library import PlainLibrary

LIBRARY = PlainLibrary(name="row_copy", instructions=("-mavx2",), cpu_flags=frozenset(("avx2",)))

# [num_rows, bytes of a row]; a row lies in one piece
Rows = npt.NDArray[np.uint8]
# Copies each second one into the first, which has its shape.
RowCopy = Callable[[Sequence[tuple[Rows, Rows]]], None]


@cache
def load_row_copy() -> RowCopy | None:
    """The function; None where it was not built or cannot run."""
    path = LIBRARY.find()
    if path is None:
        return None
    compiled = ctypes.CDLL(str(path)).relevo_copy_rows
    compiled.restype, compiled.argtypes = None, (ctypes.c_void_p, ctypes.c_size_t)

    def copy_rows(pairs: Sequence[tuple[Rows, Rows]]) -> None:
        table = array("Q")
        for target, source in pairs:
            assert target.shape == source.shape
            assert target.strides[1] == source.strides[1] == 1
            steps = target.strides[0], source.strides[0]
            num_rows, row_bytes = target.shape
            table.extend((target.ctypes.data, source.ctypes.data, *steps, row_bytes, num_rows))
        compiled(table.buffer_info()[0], len(pairs))

    return copy_rows
