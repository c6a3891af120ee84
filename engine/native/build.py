"""Builds the libraries: `python -m engine.native.build [LEVEL …]`, half a minute, once.

For this CPU, or for every CPU of a level such as x86-64-v3, which an image needs. No compiler is no
error: the engine then runs on torch's own operations, and hashes are made one by one.
"""

import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from torch.utils import cpp_extension

from engine.native import hash_chain, row_copy
from engine.native.library_file import (
    LEVELS,
    NATIVE,
    SOURCES,
    compile_flags,
    cpu_flags,
    library_path,
    usable_levels,
)
from engine.native.plain_library import PlainLibrary

logger = logging.getLogger(__name__)

_LIBRARIES = ("-ltorch_cpu", "-lc10")
# what each does, and what is done without it
_PLAIN = (
    (hash_chain.LIBRARY, "compiled hashes of blocks", "they are made one by one"),
    (row_copy.LIBRARY, "compiled copies of rows", "numpy copies them"),
)


def build_plain(library: PlainLibrary) -> Path:
    """The library's file, built unless it is there; raises as `build_library`."""
    path = library.path()
    if path.exists():
        return path
    compiler = _find_compiler()
    with _linked(path) as linked:
        flags = [*library.compile_flags, *(_python_flags() if library.python_abi else ())]
        _run([compiler, *flags, "-shared", str(library.source), "-o", str(linked)])
    return path


def build_library(level: str = NATIVE) -> Path:
    """The library's file, built unless it is there; OSError or CalledProcessError if that fails."""
    path = library_path(level)
    if path.exists():
        return path
    compiler = _find_compiler()
    with _linked(path) as linked:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [linked.with_name(f"{source.stem}.o") for source in sources]
        includes = [f"-I{each}" for each in cpp_extension.include_paths()]
        with ThreadPoolExecutor(len(sources)) as threads:
            commands = (
                [compiler, *compile_flags(level), *includes, "-c", str(source), "-o", str(made)]
                for source, made in zip(sources, objects, strict=True)
            )
            list(threads.map(_run, commands))
        libraries = [f"-L{each}" for each in cpp_extension.library_paths()]
        _run([compiler, "-shared", *map(str, objects), *libraries, *_LIBRARIES, "-o", str(linked)])
        # Tried before anybody relies on it, where this CPU can.
        if level == NATIVE or level in usable_levels(cpu_flags()):
            _run([sys.executable, "-c", f"import torch; torch.ops.load_library({str(linked)!r})"])
    return path


def _python_flags() -> tuple[str, ...]:
    """None where this Python's headers are missing: the library does without them."""
    headers = Path(sysconfig.get_path("include"))
    return ("-DRELEVO_HAS_PYTHON", f"-I{headers}") if (headers / "Python.h").exists() else ()


@contextmanager
def _linked(path: Path) -> Iterator[Path]:
    """Where to build the file, beside other pieces: it takes its place whole, or not at all."""
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        linked = Path(folder) / path.name
        yield linked
        linked.replace(path)


def _find_compiler() -> str:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise FileNotFoundError("no C++ compiler on this machine")
    return compiler


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def main(levels: Sequence[str]) -> int:
    """Build, or say in one line why not: an error only for a level that was asked for."""
    logging.basicConfig(level=logging.INFO, format="setup      %(message)s")
    if unknown := set(levels) - set(LEVELS):
        logger.error("got the levels %s but expected some of %s", unknown, list(LEVELS))
        return 2
    for library, what, otherwise in _PLAIN:
        _try(partial(build_plain, library), what, otherwise)
    are_built = [
        _try(partial(build_library, level), "compiled attention", "torch's own serves")
        for level in levels or [NATIVE]
    ]
    return 1 if levels and not all(are_built) else 0


def _try(build: Callable[[], Path], what: str, otherwise: str) -> bool:
    try:
        logger.info("%s: %s", what, build().name)
    except (OSError, subprocess.CalledProcessError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        reason = next((line for line in lines if "error" in line), lines[-1])
        logger.info("no %s, %s: %s", what, otherwise, reason)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
