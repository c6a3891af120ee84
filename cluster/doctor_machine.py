"""What of this machine matters: versions, compiled parts, limits, shared memory, clock."""

import ctypes
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from cluster.finding import Finding, ok, problem, warning
from engine.native.library_file import find_library

ROOT = Path(__file__).resolve().parent.parent
CGROUP = Path("/sys/fs/cgroup")
SHARED_MEMORY = Path("/dev/shm")  # Ray's object store lies there
MIN_PYTHON = (3, 11)
# Whose versions decide what works with what.
TOLD = ("ray", "torch", "transformers", "grpcio", "protobuf")
SHM_NEEDED = 160 * 1024**2  # the object store of a Ray of our own, and some room
MIN_FILES, GOOD_FILES = 1024, 16_384
GOOD_PROCESSES = 4096
_GIB = 1024**3
_CLOCK_UNSYNCHRONISED = 5  # adjtimex(2)


def examine() -> Iterator[Finding]:
    """All of it."""
    yield check_python(sys.version_info[:3])
    yield from check_packages(pins(ROOT / "constraints.txt"), installed())
    yield check_native()
    yield check_limit("open files", resource.getrlimit(resource.RLIMIT_NOFILE))
    yield check_limit("processes", resource.getrlimit(resource.RLIMIT_NPROC))
    yield check_shared_memory(SHARED_MEMORY)
    yield check_cpus(CGROUP)


def check_python(version: tuple[int, ...]) -> Finding:
    """Whether it is new enough."""
    text = f"{'.'.join(map(str, version))} ({sys.executable})"
    if version < MIN_PYTHON:
        return problem("python", text, "Python 3.11 or newer is needed: make setup PYTHON=…")
    return ok("python", text)


def installed() -> dict[str, str]:
    """Versions of what is installed, by normal name."""
    found = importlib.metadata.distributions()
    return {_normal(each.metadata["Name"]): each.version for each in found if each.metadata["Name"]}


def pins(file: Path) -> dict[str, str]:
    """What this checkout was tested with, of what it needs to run; empty where there is none."""
    try:
        required = importlib.metadata.requires("relevo") or []
    except importlib.metadata.PackageNotFoundError:
        required = []
    names = {_normal(re.split(r"[^\w.-]", line)[0]) for line in required if "extra ==" not in line}
    pinned = dict.fromkeys(sorted(names), "")
    lines = file.read_text().splitlines() if file.is_file() else []
    for name, _, version in (line.partition("==") for line in lines if "==" in line):
        if _normal(name) in pinned:
            pinned[_normal(name)] = version.strip()
    return pinned


def check_packages(pinned: Mapping[str, str], found: Mapping[str, str]) -> Iterator[Finding]:
    """Which are missing, and which are not those it was tested with."""
    missing = [name for name in pinned if name not in found]
    if missing:
        yield problem("packages", f"not installed: {', '.join(missing)}", "make setup")
    # A build such as 2.13.0+cpu is the same version.
    others = [
        f"{name} {found[name]} (tested: {version})"
        for name, version in pinned.items()
        if version and name in found and found[name].partition("+")[0] != version
    ]
    if others:
        yield warning("packages", f"other versions: {', '.join(others)}", "make setup")
    elif not missing:
        told = ", ".join(f"{name} {found[name]}" for name in TOLD if name in found)
        yield ok("packages", told)


def check_native() -> Finding:
    """Whether attention is compiled for this CPU."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    try:
        if find_library() is not None:
            return ok("attention", f"compiled for this CPU ({platform.machine()})")
    except importlib.metadata.PackageNotFoundError:
        return problem("attention", "torch is not installed", "make setup")
    if compiler:
        advice = "make setup compiles it in half a minute; GPUs do without"
    else:
        advice = "install a C++ compiler (g++), then make setup; GPUs do without"
    return warning("attention", "not compiled: CPU workers use torch's own, slower", advice)


def check_limit(name: str, limits: tuple[int, int]) -> Finding:
    """How many of them one process, or this user, may have."""
    soft, hard = limits
    option = {"open files": "-n", "processes": "-u"}[name]
    least, good = (MIN_FILES, GOOD_FILES) if name == "open files" else (0, GOOD_PROCESSES)
    if soft in {resource.RLIM_INFINITY} or soft >= good:
        return ok(name, "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}")
    text = f"at most {soft:,}"
    if hard == resource.RLIM_INFINITY or hard >= good:
        advice = f"ulimit {option} {good}"
    else:
        advice = f"raise the hard limit of {hard:,} (limits.conf, LimitNOFILE=, --ulimit)"
    make = problem if soft < least else warning
    return make(name, text, advice)


def check_shared_memory(directory: Path) -> Finding:
    """Whether Ray's object store finds room."""
    advice = "mount a larger one: docker run --shm-size=1g, or an emptyDir of medium Memory"
    try:
        usage = shutil.disk_usage(directory)
    except OSError as error:
        return problem("shared memory", f"no {directory}: {error.strerror}", advice)
    text = f"{directory}: {usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free"
    if usage.free < SHM_NEEDED:
        # Ray falls back to files in /tmp, and says so.
        return warning("shared memory", text, advice)
    return ok("shared memory", text)


def check_cpus(cgroup: Path) -> Finding:
    """Cores this process may use, and a quota that makes fewer of them."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(cgroup)
    if quota is None or quota >= cores:
        return ok("cores", f"{cores} of {psutil.cpu_count()}")
    return warning(
        "cores",
        f"{cores}, but a quota of {quota:g}: workers that share it will look frozen",
        f"raise the container's limit, or --set engine.num_threads={max(int(quota), 1)}",
    )


def cpu_quota(cgroup: Path) -> float | None:
    """Cores' worth of time that this container gets; None = no limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def check_clock(*, is_alone: bool) -> Finding:
    """Whether something keeps it right: between nodes, traces and certificates rely on it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "adjtimex"):
        return ok("clock", "no way to ask whether it is synchronised")
    # struct timex, all zeros: only read.
    if libc.adjtimex(ctypes.create_string_buffer(512)) == _CLOCK_UNSYNCHRONISED:
        if is_alone:
            return ok("clock", "not synchronised, which matters between nodes only")
        return warning(
            "clock",
            "not synchronised",
            "run chrony or systemd-timesyncd: traces of several nodes and TLS need it",
        )
    return ok("clock", "synchronised")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
