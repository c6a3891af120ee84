"""Workers of another server get a core each, and their polling thread what is left of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.pin_workers import LEAST_PRIORITY, pin

POLLING = """
import threading, time
def poll():
    while True: pass
threading.Thread(target=poll, daemon=True).start()
print("polls", flush=True)
time.sleep(60)
"""


def test_a_worker_gets_its_core_and_its_polling_thread_comes_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bench.pin_workers.WATCHED_S", 0.3)
    worker = subprocess.Popen(
        ["VLLM::Worker_TP0", "-c", POLLING], executable=sys.executable, stdout=subprocess.PIPE
    )
    try:
        assert worker.stdout is not None
        worker.stdout.readline()
        pin([worker.pid])
        threads = [int(each.name) for each in Path(f"/proc/{worker.pid}/task").iterdir()]
        assert len(threads) == 2
        assert all(os.sched_getaffinity(thread) == {0} for thread in threads)
        polling = next(thread for thread in threads if thread != worker.pid)
        assert os.getpriority(os.PRIO_PROCESS, polling) == LEAST_PRIORITY
        assert os.getpriority(os.PRIO_PROCESS, worker.pid) < LEAST_PRIORITY
    finally:
        worker.kill()
        worker.communicate()


def test_a_process_without_a_worker_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"no VLLM::Worker below"):
        pin([os.getpid()])
