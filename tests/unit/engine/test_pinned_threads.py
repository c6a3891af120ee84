"""Threads that compute keep to the cores they were told, and no others do."""

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.native.library import load_library

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None, reason="no C++ compiler on this machine"
)
CoresOfThreads = dict[str, set[int]]  # the cores of each thread, by its id


def threads() -> CoresOfThreads:
    cores = {}
    for path in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # one of another test ends meanwhile
            cores[path.name] = os.sched_getaffinity(int(path.name))
    return cores


def on_a_thread(call: Callable[[], None]) -> CoresOfThreads:
    """Run `call` on a thread of its own; where that and its new threads may run then."""
    made: CoresOfThreads = {}

    def run() -> None:
        before = threads()
        call()
        own = str(threading.get_native_id())
        made.update(
            {key: cores for key, cores in threads().items() if key == own or key not in before}
        )

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return made


def test_a_team_has_a_core_each_and_nobody_else_moves(
    make_engine: Callable[..., Engine],
) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("this machine has one core")
    engine, before = make_engine(), threads()

    def compute() -> None:
        engine.pin_threads(cores)
        torch.set_num_threads(2)  # of this thread: the same team
        torch.ones(1_000_000).add_(1)

    num_threads = torch.get_num_threads()
    try:
        assert sorted(on_a_thread(compute).values(), key=min) == [{core} for core in cores]
    finally:
        torch.set_num_threads(num_threads)
    after = threads()
    assert all(after[key] == before[key] for key in before.keys() & after.keys())


def test_a_core_that_is_not_to_be_had_is_an_error() -> None:
    assert load_library(), "make setup builds it"
    for core in (-1, 10**6, 1023):
        with pytest.raises(RuntimeError, match=r"expected|not to be had"):
            torch.ops.relevo.pin_threads([core])


def test_who_does_not_want_it_has_no_threads_to_pin(make_engine: Callable[..., Engine]) -> None:
    assert make_engine().num_threads_to_pin == torch.get_num_threads()
    assert make_engine(pin_threads=False).num_threads_to_pin == 0
