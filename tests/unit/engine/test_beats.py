"""Signs of life of a thread: what others do to it is told apart from what it does itself."""

import os
import threading
import time
from pathlib import Path

import pytest

from engine.beats import Beats
from tests.busy_core import busy_core
from tests.patience import NAP_S, naps

pytestmark = pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="only Linux says how long one waits"
)


class Hand:
    """A thread that beats once; then it turns, or it sleeps, until it is let go."""

    def __init__(self, *, core: int | None) -> None:
        self.beats = Beats()
        self._core = core
        self._has_begun, self._may_end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self.beats.begin()
        if self._core is not None:
            os.sched_setaffinity(0, {self._core})  # of this thread alone
        self.beats.beat()
        self._has_begun.set()
        while self._core is not None and not self._may_end.is_set():
            pass
        self._may_end.wait()

    def __enter__(self) -> Beats:
        self._thread.start()
        self._has_begun.wait()
        return self.beats

    def __exit__(self, *_error: object) -> None:
        self._may_end.set()
        self._thread.join()


def test_a_thread_that_shares_its_core_says_how_long_it_waited() -> None:
    with busy_core() as core, Hand(core=core) as beats:
        for _ in naps(20.0):
            age_s, waited_s = beats.age_s(), beats.waited_s()
            if waited_s >= 0.1:
                break
            time.sleep(NAP_S)
        assert waited_s >= 0.1
        assert waited_s <= age_s + 0.05


def test_a_thread_that_sleeps_waits_for_no_core() -> None:
    with Hand(core=None) as beats:
        for _ in naps(20.0):
            before, age_s = beats.waited_s(), beats.age_s()
            time.sleep(10 * NAP_S)
            if beats.waited_s() == before:
                break
        assert beats.waited_s() == before
        assert beats.age_s() >= age_s + 10 * NAP_S


def test_a_beat_begins_anew_and_the_end_of_the_thread_is_no_error() -> None:
    with Hand(core=None) as beats:
        time.sleep(5 * NAP_S)
    assert beats.waited_s() >= 0.0
    assert beats.age_s() >= 5 * NAP_S
    beats.beat()
    assert beats.age_s() < 5 * NAP_S
