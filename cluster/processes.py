"""Finds and ends every process that this one started, also those whose own parents are gone."""

import ctypes
import logging
import sys
from collections.abc import Callable

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_KILL_WITHIN_S = 10.0  # the kernel takes back gigabytes before a killed process is gone

_log = logging.getLogger(__name__)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent ends, so that none gets out of sight."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            _log.warning("cannot become a subreaper: errno %d", ctypes.get_errno())


def descendants() -> list[psutil.Process]:
    """Every living process below this one; a zombie is none."""
    alive = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
        except psutil.NoSuchProcess:
            continue
    return alive


def end_descendants(grace_s: float) -> list[int]:
    """Ask every descendant to end, then kill; return the pids of those that did not die."""
    _signal_all(lambda process: process.terminate())
    psutil.wait_procs(descendants(), timeout=grace_s)
    _signal_all(lambda process: process.kill())
    psutil.wait_procs(descendants(), timeout=_KILL_WITHIN_S)
    return [process.pid for process in descendants()]


def _signal_all(send: Callable[[psutil.Process], None]) -> None:
    for process in descendants():
        try:
            send(process)
        except psutil.NoSuchProcess:
            continue
