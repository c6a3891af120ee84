"""How our processes reach each other."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Mutual TLS between our own processes; every node holds the same three files."""

    certificate_file: str  # PEM; shown by servers and by clients
    private_key_file: str  # PEM
    ca_file: str  # PEM; who may have signed the other side's certificate
    server_name: str = "relevo-worker"  # name in the certificate; workers are dialled by number

    def __post_init__(self) -> None:
        """Refuse half a configuration."""
        for name in ("certificate_file", "private_key_file", "ca_file"):
            if not getattr(self, name):
                raise ValueError(f"Got an empty rpc.tls.{name} but expected the path of a PEM file")


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcConfig:
    """Settings of the internal gRPC servers and channels."""

    port_range: str = ""  # "low-high", both included; empty = any free port
    tls: TlsConfig | None = None  # None = plain text

    def __post_init__(self) -> None:
        """Refuse a range that is none."""
        self.ports()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RpcConfig":
        """Build from plain data, such as parsed JSON."""
        tls = values.get("tls")
        return cls(**{**values, "tls": TlsConfig(**tls) if tls else None})

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that `from_dict` takes."""
        return asdict(self)

    def ports(self) -> range:
        """Return the ports a server may take, in the order it tries them; 0 means any."""
        if not self.port_range:
            return range(1)
        low, _, high = self.port_range.partition("-")
        if not (low.isascii() and low.isdigit() and high.isascii() and high.isdigit()):
            raise ValueError(f'Got {self.port_range = } but expected "low-high"')
        if not 1 <= int(low) <= int(high) <= 65535:
            raise ValueError(f"Got {self.port_range = } but expected ports in [1, 65535]")
        return range(int(low), int(high) + 1)
