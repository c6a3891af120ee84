"""A server to compare: started here or elsewhere, frozen while another one is measured.

An idle server that polls would take the cores from the one that is measured, so where `freeze` is
set all its processes are stopped (SIGSTOP) until its own turn. Relevo's workers sleep when idle,
and Ray would take a frozen process for a dead one, so it runs on.
"""

import contextlib
import os
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from cluster.http_client import get_json, open_client
from cluster.server_process import ServerProcess, free_ports, process_tree, send_signal

READY_WITHIN_S = 300.0
PORTS = ("port", "port2", "port3")


class ServerSpec(BaseModel):
    """One entry of the servers' file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = ""  # where it runs already; empty = it is started with `command`
    pids: list[int] = []  # of one that runs already, to be frozen; their children, too
    command: str = ""  # {port}, {port2}, {port3} are free ones, {env} the environment's values
    environment: dict[str, str] = {}  # what it gets beside ours; {env} as in the command
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
        self, name: str, spec: ServerSpec, *, url: str = "", process: ServerProcess | None = None
    ) -> None:
        self.name = name
        self.spec = spec
        self.url = (url or spec.url).rstrip("/").removesuffix("/v1")
        self._process = process
        self._pids = spec.pids if process is None else [process.pid]

    def wait_until_ready(self) -> str:
        """Return the id of its model once it is served; RuntimeError if that never happens."""
        if self._process is not None:
            self._process.wait_until_ready(self.url, self.spec.ready, within_s=READY_WITHIN_S)
        if self.spec.model:
            return self.spec.model
        with open_client(self.url, api_key="") as client:
            return str(get_json(client, "/v1/models")["data"][0]["id"])

    def freeze(self) -> None:
        """Stop all its processes, if they are to be."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.spec.freeze:
            for pid in self._pids:
                send_signal(process_tree(pid), number)


@contextlib.contextmanager
def running(name: str, spec: ServerSpec, log_folder: Path) -> Iterator[PeerServer]:
    """Start it where it does not run yet, and end then what was started."""
    if spec.url:
        yield PeerServer(name, spec)
        return
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    command = shlex.split(spec.command.format(env=os.environ, **ports))
    log = log_folder / f"{name}.log"
    environment = {key: value.format(env=os.environ) for key, value in spec.environment.items()}
    with ServerProcess(command, log=log, environment=environment) as process:
        url = f"http://127.0.0.1:{ports['port']}"
        yield PeerServer(name, spec, url=url, process=process)
