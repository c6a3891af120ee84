"""Where the compiled library of this package lies; finding out needs no torch."""

import hashlib
import importlib.metadata
import platform
from pathlib import Path

SOURCES = Path(__file__).parent
NATIVE = "native"  # for this CPU alone
_V3 = frozenset(("abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"))
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_BFLOAT16 = _V4 | {"avx512_bf16"}
# What a library that travels (in an image) is built for, the best first: GCC's names of it and what
# Linux says of a CPU that can run it.
LEVELS = {
    "x86-64-v4+avx512bf16+amx-tile+amx-bf16": _BFLOAT16 | {"amx_bf16", "amx_tile"},
    "x86-64-v4+avx512bf16": _BFLOAT16,
    "x86-64-v4": _V4,
    "x86-64-v3": _V3,
}


def compile_flags(level: str = NATIVE) -> tuple[str, ...]:
    """The compiler's flags for this CPU, or for every CPU of a level."""
    architecture, *extensions = level.split("+")
    machine = (f"-march={architecture}", *(f"-m{each}" for each in extensions))
    # Never -ffast-math when linking: it would turn off denormal numbers for the whole process.
    flags = ("-std=c++20", "-O3", *machine, "-ffast-math", "-fPIC", "-fvisibility=hidden")
    return (*flags, "-fopenmp")  # torch's own threads: the library brings no OpenMP of its own


def library_path(level: str = NATIVE) -> Path:
    """The file for these sources, this torch, and this CPU or every CPU of a level."""
    key = hashlib.sha256()
    for source in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        key.update(source.read_bytes())
    cpu = cpu_flags() if level == NATIVE else level
    torch_version = importlib.metadata.version("torch")
    key.update(" ".join((*compile_flags(level), torch_version, cpu)).encode())
    return SOURCES / "built" / f"relevo-{key.hexdigest()[:16]}.so"


def find_library() -> Path | None:
    """The best one that was built and that this CPU can run."""
    paths = (library_path(level) for level in (NATIVE, *usable_levels(cpu_flags())))
    return next((path for path in paths if path.exists()), None)


def usable_levels(cpu: str) -> list[str]:
    """The levels that a CPU can run, the best first; `cpu` is its line of flags."""
    return [level for level, needed in LEVELS.items() if needed <= set(cpu.split())]


def cpu_flags() -> str:
    """What the compiler may use of this CPU, as the kernel says it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    wanted = (line for line in lines if line.startswith(("flags", "Features")))
    return next(wanted, platform.processor() or platform.machine())
