"""The output: a JSON line for each request that is over, in the order they ended.

Each line is one write at the file's end, so a crash leaves whole lines and at most one torn one,
which the next start cuts off. Invariant: no `custom_id` has two lines.
"""

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import orjson

FIRST_BYTES: Final = b'{"id":"batch_req_'  # of every line
SYNC_AFTER_S: Final = 1.0  # what a power failure may cost


class OutputFile:
    """Appends; one process at a time."""

    def __init__(self, path: Path, *, now: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._now = now
        self._synced_at_s = now()
        self.done: set[str] = set()  # ids that have their line
        self.num_failed = 0  # of them, with an error

    def __enter__(self) -> "OutputFile":
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ValueError(f"{self.path} cannot be written: {error.strerror}") from error
        try:
            self._begin()
        except BaseException:
            os.close(self._file)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.fsync(self._file)
        os.close(self._file)  # and with it the lock

    def append(self, line: dict[str, Any]) -> None:
        """Write the line of one request."""
        custom_id = line["custom_id"]
        assert custom_id not in self.done, custom_id
        self.done.add(custom_id)
        self.num_failed += is_failure(line)
        data = orjson.dumps(line) + b"\n"
        assert data.startswith(FIRST_BYTES)
        while data:
            data = data[os.write(self._file, data) :]
        if self._now() - self._synced_at_s >= SYNC_AFTER_S:
            os.fsync(self._file)
            self._synced_at_s = self._now()

    def _begin(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process writes {self.path}") from error
        whole_bytes = 0
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n") and _is_torn(line):
                    break  # when a process or the machine ended
                self._remember(line, number)
                whole_bytes += len(line)
        os.ftruncate(self._file, whole_bytes)

    def _remember(self, data: bytes, number: int) -> None:
        try:
            line = orjson.loads(data)
            custom_id = line["custom_id"]
            num_failed = is_failure(line)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path}, line {number} is not of a batch's output; name another file"
            ) from error
        if custom_id in self.done:
            raise ValueError(f"{self.path}, line {number}: {custom_id!r} has a line already")
        self.done.add(custom_id)
        self.num_failed += num_failed


def _is_torn(line: bytes) -> bool:
    """Whether it is the beginning of one of our lines, and not of somebody's file."""
    return line[: len(FIRST_BYTES)] == FIRST_BYTES[: len(line)]


def is_failure(line: dict[str, Any]) -> bool:
    """Whether a request has failed, by its line."""
    return bool(line.get("error")) or line["response"]["status_code"] != 200
