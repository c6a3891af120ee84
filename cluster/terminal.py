"""Keeps the person's terminal for our own lines while Ray and its libraries write to a file."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console


class Terminal:
    """Two consoles on copies of stdout and stderr, which stay ours whatever happens to those."""

    def __init__(self) -> None:
        self.out = Console(file=os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1))
        self.err = Console(file=os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1))

    def fail(self, text: str) -> None:
        """Write one clear line to stderr."""
        self.err.print(text, soft_wrap=True, highlight=False, markup=False)


@contextlib.contextmanager
def redirected(log: Path) -> Iterator[None]:
    """Send everything written to stdout and stderr, C++ included, to `log`."""
    kept = {number: os.dup(number) for number in (1, 2)}
    with log.open("a", buffering=1) as file:
        for number in kept:
            os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in kept.items():
                os.dup2(copy, number)
                os.close(copy)
