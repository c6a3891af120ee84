"""A compiled library of one source, without torch: where its file lies, and whether it runs."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from engine.native.library_file import SOURCES, cpu_flags

_COMPILE_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainLibrary:
    """Any CPU with these instructions runs it, wherever it was built."""

    # of `NAME.cc`: not .cpp, it is no part of the library that needs torch
    name: str
    # the compiler's names for the instructions, and Linux's
    instructions: tuple[str, ...]
    cpu_flags: frozenset[str]
    # where it looks into Python's own objects
    python_abi: str = ""

    @property
    def source(self) -> Path:
        """What is compiled."""
        return SOURCES / f"{self.name}.cc"

    @property
    def compile_flags(self) -> tuple[str, ...]:
        """The compiler's, but for what depends on where it runs."""
        return (*_COMPILE_FLAGS, *self.instructions)

    def path(self) -> Path:
        """The file for this source."""
        key = hashlib.sha256(self.source.read_bytes())
        key.update(" ".join((*self.compile_flags, self.python_abi)).encode())
        return SOURCES / "built" / f"{self.name.replace('_', '-')}-{key.hexdigest()[:16]}.so"

    def find(self) -> Path | None:
        """The file if it was built and this CPU can run it."""
        path = self.path()
        can_run = path.exists() and set(cpu_flags().split()) >= self.cpu_flags
        return path if can_run else None
