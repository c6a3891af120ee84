"""A server to compare: started here or elsewhere, frozen while another one is measured.

An idle server that polls would take the cores from the one that is measured, so where `freeze` is
set all its processes are stopped (SIGSTOP) until its own turn. Relevo's workers sleep when idle,
and Ray would take a frozen process for a dead one, so it runs on.
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import httpx
import psutil
import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from cluster.http_client import open_client

READY_WITHIN_S = 300.0
END_WITHIN_S = 60.0
PORTS = ("port", "port2", "port3")


class ServerSpec(BaseModel):
    """One entry of the servers' file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = ""  # where it runs already; empty = it is started with `command`
    pid: int | None = None  # of one that runs already, to be frozen
    command: str = ""  # {port}, {port2}, {port3} are free ones, {env} the environment's values
    environment: dict[str, str] = {}
    ready: str = "/v1/models"  # answers 200 when it is ready
    model: str = ""  # empty = the first it names
    prompts: Literal["ids", "text", "chat"] = "ids"
    extra_body: dict[str, Any] = {}
    freeze: bool = False


Specs = TypeAdapter(dict[str, Annotated[ServerSpec, Field()]])


def read_specs(path: Path) -> dict[str, ServerSpec]:
    """Read the servers' file; ValueError says what is wrong with it."""
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    try:
        specs = Specs.validate_python(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path}: {place}: {first['msg']}") from error
    for name, spec in specs.items():
        if bool(spec.url) == bool(spec.command):
            raise ValueError(f"{path}: {name}: give either url or command")
    return specs


class PeerServer:
    """One running server."""

    def __init__(
        self,
        name: str,
        spec: ServerSpec,
        *,
        url: str = "",
        pid: int | None = None,
        has_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = name
        self.spec = spec
        self.url = (url or spec.url).rstrip("/").removesuffix("/v1")
        self._pid = pid or spec.pid
        self._has_ended = has_ended

    def wait_until_ready(self) -> str:
        """Return the id of its model once it is served; TimeoutError after five minutes."""
        end_s = time.monotonic() + READY_WITHIN_S
        with open_client(self.url, api_key="") as client:
            while time.monotonic() < end_s:
                if self._has_ended():
                    raise RuntimeError(f"{self.name} ended before it was ready")
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(self.spec.ready, timeout=5).is_success:
                        models = client.get("/v1/models", timeout=5).json()
                        return self.spec.model or str(models["data"][0]["id"])
                time.sleep(0.5)
        raise TimeoutError(f"{self.name} at {self.url} is not ready after {READY_WITHIN_S:g} s")

    def freeze(self) -> None:
        """Stop all its processes, if they are to be."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if not self.spec.freeze or self._pid is None:
            return
        for process in _tree(self._pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


@contextlib.contextmanager
def running(name: str, spec: ServerSpec, log_folder: Path) -> Iterator[PeerServer]:
    """Start it where it does not run yet, and end then what was started."""
    if spec.url:
        yield PeerServer(name, spec)
        return
    ports = dict(zip(PORTS, _free_ports(len(PORTS)), strict=True))
    command = shlex.split(spec.command.format(env=os.environ, **ports))
    with (log_folder / f"{name}.log").open("wb") as log:
        process = _start(command, spec.environment, log)
        server = PeerServer(
            name,
            spec,
            url=f"http://127.0.0.1:{ports['port']}",
            pid=process.pid,
            has_ended=lambda: process.poll() is not None,
        )
        try:
            yield server
        finally:
            server.thaw()
            _end(process)


def _start(
    command: list[str], environment: Mapping[str, str], log: IO[bytes]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=log,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C would; what is left after a minute is killed."""
    left = _tree(process.pid)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_WITHIN_S)
    for each in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def _tree(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports
