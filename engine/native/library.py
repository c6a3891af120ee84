"""The compiled library of this package: where it lies, and loading it."""

import hashlib
import logging
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
# Never -ffast-math when linking: it would turn off denormal numbers for the whole process.
COMPILE_FLAGS = (
    *("-std=c++20", "-O3", "-march=native", "-ffast-math", "-fPIC", "-fvisibility=hidden"),
    "-fopenmp",  # torch's own threads: the library brings no OpenMP of its own
)


def library_path() -> Path:
    """The file for these sources, this torch and this CPU."""
    key = hashlib.sha256()
    for source in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        key.update(source.read_bytes())
    key.update(" ".join((*COMPILE_FLAGS, torch.__version__, _cpu())).encode())
    return SOURCES / "built" / f"relevo-{key.hexdigest()[:16]}.so"


@cache
def load_library() -> bool:
    """Make `torch.ops.relevo` known; False where the library was not built."""
    path = library_path()
    if not path.exists():
        logger.warning(
            "no compiled attention for this CPU, using torch's own: "
            "'make setup' builds it where there is a C++ compiler"
        )
        return False
    operations: Any = torch.ops
    operations.load_library(str(path))
    return True


def _cpu() -> str:
    """What the compiler may use of this CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    wanted = (line for line in lines if line.startswith(("flags", "Features")))
    return next(wanted, platform.processor() or platform.machine())
