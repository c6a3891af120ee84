"""A process of its own for products of rounded inputs, with the CPU's tiles or without them.

Linux gives a process the tiles once and for good, so one that goes without must be another.
"""

import ctypes
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

from engine.native.library import load_library

_SMALL_STACK = ctypes.create_string_buffer(4096)


class _SignalStack(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def rounding_process(*, may_use_tiles: bool) -> Iterator[ProcessPoolExecutor]:
    """One worker that has loaded the library."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, _start, (may_use_tiles,)) as process:
        yield process


def _start(may_use_tiles: bool) -> None:
    if not may_use_tiles:
        _deny_tiles()
    assert load_library(), "make setup builds it"


def _deny_tiles() -> None:
    """Linux gives no tiles to a process with a signal stack that could not hold them."""
    stack = _SignalStack(ctypes.addressof(_SMALL_STACK), 0, len(_SMALL_STACK))
    assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
