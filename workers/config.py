"""What a worker of either pool is made of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.config import EngineConfig
from kv_transfer.config import KVTransferConfig
from rpc.config import RpcConfig
from telemetry.config import TelemetryConfig
from workers.plain_config import from_plain, to_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of one worker."""

    engine: EngineConfig
    kv_transfer: KVTransferConfig = field(default_factory=KVTransferConfig)
    rpc: RpcConfig = field(default_factory=RpcConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    bind_host: str = "127.0.0.1"  # address the gRPC server listens on
    token_file: str = ""  # secret of the internal gRPC
    drain_s: float = 30.0  # from SIGTERM to the last stream's end
    max_waiting_requests: int | None = None  # None = 4 x engine.max_num_seqs

    def __post_init__(self) -> None:
        """Refuse values no worker can run with."""
        if not self.token_file:
            raise ValueError(f"Got {self.token_file = } but expected a path")
        if self.drain_s < 0:
            raise ValueError(f"Got {self.drain_s = } but expected 0 or more seconds")
        if self.max_waiting_requests is not None and self.max_waiting_requests < 1:
            raise ValueError(f"Got {self.max_waiting_requests = } but expected at least 1")

    @property
    def max_waiting(self) -> int:
        """Requests that may wait for the engine before more are refused."""
        return self.max_waiting_requests or 4 * self.engine.max_num_seqs

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "WorkerConfig":
        """Read plain data; ValueError names an unknown key."""
        return from_plain(cls, data)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back."""
        return to_plain(self)
