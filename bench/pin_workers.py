"""Gives the workers of a disaggregated vLLM a core each: those below the given processes, in turn.

    .venv/bin/python -m bench.pin_workers PREFILL_PID DECODE_PID

vLLM's NIXL connector moves the main thread of every worker to the machine's last core, and NIXL has
a thread in each that polls without a pause. So on a machine with a core for each worker all would
compute on one, and share it with what polls. To be run once both serve, and are idle.
"""

import os
import sys
import time
from collections.abc import Sequence

import psutil

from cluster.server_process import process_tree

WORKER = "VLLM::Worker"
WATCHED_S = 2.0
LEAST_PRIORITY = 19


def pin(roots: Sequence[int]) -> None:
    """Worker n, with all its threads, on core n; its thread that polls comes last there."""
    for core, root in enumerate(roots):
        worker = _worker_below(root)
        polls = _busiest_thread_beside_the_main_one(worker)
        for thread in worker.threads():
            os.sched_setaffinity(thread.id, {core})
        os.setpriority(os.PRIO_PROCESS, polls, LEAST_PRIORITY)
        print(f"worker {worker.pid} on core {core}, its thread {polls} last")


def _worker_below(root: int) -> psutil.Process:
    for process in process_tree(root):
        if process.cmdline()[:1] and process.cmdline()[0].startswith(WORKER):
            return process
    raise SystemExit(f"no {WORKER} below process {root}")


def _busiest_thread_beside_the_main_one(process: psutil.Process) -> int:
    before = _times(process)
    time.sleep(WATCHED_S)
    used = {thread: s - before.get(thread, 0.0) for thread, s in _times(process).items()}
    del used[process.pid]
    return max(used, key=lambda thread: used[thread])


def _times(process: psutil.Process) -> dict[int, float]:
    return {each.id: each.user_time + each.system_time for each in process.threads()}


if __name__ == "__main__":
    pin([int(each) for each in sys.argv[1:]])
