"""OpenMP in a worker: what it is told before torch is imported, and how it keeps one team.

A step is some 200 pieces of work that all threads share. In libgomp a thread that waits for the
next piece turns in a loop for a while and then sleeps; to wake it again takes longer than many a
piece. So the while must be longer than what lies between two pieces. But one that turns holds a
core, which the event loop, the ingress or a thread of its own team may need: no longer than that.

libgomp makes a team for each thread that computes, and once all teams together have more threads
than there are cores it turns a hundred times at most, whatever it was told. So whoever computes
only once does it on a thread that ends: its team ends with it.
"""

import asyncio
from collections.abc import Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# 20 to 70 us on x86, where a turn is a `pause` of 20 to 70 ns; libgomp's own choice is 300,000.
_SPIN_COUNT = 1_000

T = TypeVar("T")


def apply(num_threads: int | None, environ: MutableMapping[str, str]) -> None:
    """Put the settings into `environ`; a spin count that is there already stays."""
    environ.setdefault("GOMP_SPINCOUNT", str(_SPIN_COUNT))
    if num_threads is not None:
        environ["OMP_NUM_THREADS"] = str(num_threads)


async def compute_once(call: Callable[[], T]) -> T:
    """Run `call` on a thread that ends with it."""
    passing = ThreadPoolExecutor(1)
    try:
        return await asyncio.get_running_loop().run_in_executor(passing, call)
    finally:
        passing.shutdown(wait=False)
