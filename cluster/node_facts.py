"""What one node of a Ray cluster says of itself; Ray runs this there."""

import importlib.metadata
import os
import platform
import resource
import shutil
import time
from dataclasses import dataclass

from api.build import this_build

# Whose versions must be the same on all nodes: what they send each other depends on them.
COMPARED = ("relevo", "ray", "torch", "transformers", "grpcio", "protobuf")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Of one node."""

    node: str  # its address
    versions: dict[str, str]  # of python, our code and what is compared; empty = not installed
    num_files: int  # that a process may open
    shm_free_bytes: int
    num_cores: int
    time_s: float  # since the epoch, by its own clock

    def clock_off_s(self, start_s: float, end_s: float) -> float:
        """How far its clock is from ours, if it looked around between these two times of ours."""
        return max(start_s - self.time_s, self.time_s - end_s, 0.0)


def gather(node: str) -> NodeFacts:
    """Look around."""
    versions = {"python": platform.python_version(), "build": this_build().digest}
    for name in COMPARED:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    return NodeFacts(
        node=node,
        versions=versions,
        num_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        shm_free_bytes=shutil.disk_usage("/dev/shm").free,
        num_cores=len(os.sched_getaffinity(0)),
        time_s=time.time(),
    )
