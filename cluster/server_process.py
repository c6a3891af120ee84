"""A server of its own session, from its start until all its processes have ended."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import psutil

from cluster.http_client import open_client

END_WITHIN_S = 60.0
PORTS = range(20_000, 32_768)  # above those of Ray's workers, below those Linux hands out
TAIL_BYTES = 2000  # of its log, where it ended by itself


class ServerProcess:
    """Runs a command while it is entered; it is asked to end, and killed after a minute."""

    def __init__(
        self, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._command = command
        self._log = log
        self._environment = {**os.environ, **(environment or {})}

    def __enter__(self) -> "ServerProcess":
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        left = process_tree(self._process.pid)
        send_signal(left, signal.SIGCONT)
        # Not as Ctrl-C does: background jobs of a shell ignore that, and so does what they start.
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_WITHIN_S)
        send_signal(left, signal.SIGKILL)
        self._process.wait()

    @property
    def pid(self) -> int:
        """Of the process that was started."""
        return self._process.pid

    def wait_until_ready(self, url: str, path: str, *, within_s: float) -> None:
        """Wait until `path` answers 200; RuntimeError with its last words if it never does."""
        end_s = time.monotonic() + within_s
        with open_client(url, api_key="") as client:
            while time.monotonic() < end_s and self._process.poll() is None:
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(path, timeout=5).status_code == httpx.codes.OK:
                        return
                time.sleep(0.5)
        tail = self._log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
        raise RuntimeError(f"{self._command[0]} did not become ready; the end of its log:\n{tail}")


def process_tree(pid: int) -> list[psutil.Process]:
    """A process and all below it; none when it is gone."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def send_signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Signal those that still run."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now, nor gets before they are used.

    One of those that Linux hands out to whoever names none might be gone by then.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if len(found) == count:
            break
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
    return found
