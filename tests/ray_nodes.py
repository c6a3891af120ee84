"""A Ray cluster of several nodes on this machine, in a process of its own: a foreign one.

python -m tests.ray_nodes       each line of stdin adds a node, the first one is the head
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import psutil

from cluster.server_process import free_ports

NODE_WITHIN_S = 120.0
ROOT = Path(__file__).resolve().parents[1]


@dataclass(slots=True)
class RayNodes:
    """The other side of the process below: adds nodes, looks at them, ends them all."""

    process: subprocess.Popen[str]
    environment: Mapping[str, str]  # what a client of the cluster needs: Ray's token
    dashboard: str
    address: str = ""  # of the head's GCS
    raylets: list[psutil.Process] = field(default_factory=list)  # the head's is the first

    @classmethod
    def start(cls, folder: Path, **head: Any) -> "RayNodes":
        """Start the head; `folder` has a short path, as Ray's sockets need one."""
        token = folder / "ray_token"
        token.write_text("0" * 64)
        environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_ADDRESS": "",
            "RAY_TMPDIR": str(folder),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.ray_nodes"],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "nodes.log").open("w"),
            text=True,
            start_new_session=True,
        )
        (dashboard,) = free_ports(1)
        nodes = cls(process, environment, f"http://127.0.0.1:{dashboard}")
        arguments = {"dashboard_host": "127.0.0.1", "dashboard_port": dashboard}
        try:
            nodes.add(**head, **arguments, include_dashboard=True)
        except BaseException:
            nodes.stop()
            raise
        return nodes

    def add(self, **node: Any) -> psutil.Process:
        """Add a node; its raylet, whose children are its workers."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(node) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the nodes have ended, see nodes.log"
        told = json.loads(line)
        self.address = told["address"]
        self.raylets.append(psutil.Process(told["raylet"]))
        return self.raylets[-1]

    def stop(self) -> None:
        """End all nodes and whatever they started."""
        parent = psutil.Process(self.process.pid)
        children = parent.children(recursive=True)
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for child in children:
            if child.is_running():
                child.kill()


def replicas(raylet: psutil.Process) -> list[str]:
    """Names of the Serve deployments with a replica on a node, one a replica."""
    names = [child.cmdline()[:1] for child in raylet.children(recursive=True)]
    found = [name[0].split(":")[-1] for name in names if name and "ServeReplica" in name[0]]
    return sorted(found)


def _run(lines: TextIO, out: TextIO) -> None:
    from ray.cluster_utils import Cluster  # noqa: PLC0415 - only the child needs Ray

    cluster = Cluster()
    for line in lines:
        node = cluster.add_node(**json.loads(line))
        raylet = node.all_processes["raylet"][0].process
        out.write(json.dumps({"address": cluster.address, "raylet": raylet.pid}) + "\n")
        out.flush()
    cluster.shutdown()


if __name__ == "__main__":
    # Ray prints to stdout, too; what is told goes where it printed before.
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _run(sys.stdin, told)
