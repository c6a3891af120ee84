"""OpenMP in a worker: its settings, and the thread that ends with its team."""

import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.patience import until
from workers import openmp


def test_threads_are_the_engines_and_who_waits_turns_briefly() -> None:
    environ = {"OMP_NUM_THREADS": "7"}
    openmp.apply(2, environ)
    assert environ["OMP_NUM_THREADS"] == "2"
    assert 0 < int(environ["GOMP_SPINCOUNT"]) < 300_000


def test_a_spin_count_of_the_environment_stays() -> None:
    environ = {"GOMP_SPINCOUNT": "5"}
    openmp.apply(None, environ)
    assert environ == {"GOMP_SPINCOUNT": "5"}


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
async def test_who_computes_once_leaves_no_team() -> None:
    def compute() -> tuple[threading.Thread, set[str]]:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            before = _threads()
            assert torch.ones(1_000_000).add_(1).sum() == 2_000_000
            return threading.current_thread(), _threads() - before
        finally:
            torch.set_num_threads(num_threads)

    thread, team = await openmp.compute_once(compute)
    await until(lambda: not thread.is_alive())
    await until(lambda: not team & _threads())
    assert len(team) == 2


async def test_what_it_raises_comes_to_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        await openmp.compute_once(lambda: 1 // 0)


def _threads() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}
