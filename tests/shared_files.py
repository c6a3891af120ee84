"""Files in memory that processes share: which belong to whom, and which of them are still there."""

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/dev/shm")


def shared_by(pids: Iterable[int]) -> set[str]:
    """What those of these processes that live have mapped of it; others of this machine have theirs
    there, too."""
    found: set[str] = set()
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found |= set(re.findall(rf" {FOLDER}/(\S+)", maps))
    return found


def still_there(names: Iterable[str]) -> list[str]:
    """Those of them that exist."""
    return sorted(name for name in names if (FOLDER / name).exists())
