"""A core that somebody else wants, too."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def busy_core() -> Iterator[int]:
    """One of our cores, which another process never leaves."""
    core = min(os.sched_getaffinity(0))
    program = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        yield core
    finally:
        process.kill()
        process.wait()
