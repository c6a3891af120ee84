"""Who a worker is and where it listens: what discovery hands to the ingresses."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
from relevo.v1 import common_pb2


def process_incarnation() -> int:
    """Return the start of this process, in µs since the epoch."""
    return round(psutil.Process().create_time() * 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDescription:
    """One worker. Invariant: two processes never share both `worker_id` and `incarnation`."""

    worker_id: str  # "<pool>-<rank>"
    pool: str  # prefill or decode
    incarnation: int
    address: str  # host:port of its gRPC server
    node_id: str
    pid: int
    zone: str = ""  # of its node
    # The parts of its start, in order.
    start_s: Mapping[str, float] = field(default_factory=dict, hash=False)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "WorkerDescription":
        """Build from plain data, such as parsed JSON."""
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that `from_dict` takes."""
        return asdict(self)

    def to_ref(self) -> common_pb2.WorkerRef:
        """Return the identity as it travels in messages."""
        return common_pb2.WorkerRef(worker_id=self.worker_id, incarnation=self.incarnation)

    def to_peer(self) -> common_pb2.Peer:
        """Return what other workers are told about this one."""
        return common_pb2.Peer(
            worker=self.to_ref(), address=self.address, node_id=self.node_id, zone=self.zone
        )
