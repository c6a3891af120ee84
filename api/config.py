"""What an ingress and its model are told at start."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """TLS on both public ports; with a client CA only holders of its certificates get through."""

    certificate_file: str  # PEM, with the chain
    private_key_file: str  # PEM
    client_ca_file: str = ""  # PEM; empty: clients need no certificate

    def __post_init__(self) -> None:
        """Refuse half a configuration."""
        for name in ("certificate_file", "private_key_file"):
            if not getattr(self, name):
                raise ValueError(f"Got an empty tls.{name} but expected the path of a PEM file")


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressConfig:
    """Where the two servers listen and whom they let in."""

    bind_host: str = "127.0.0.1"
    http_port: int = 8000  # 0: any free port
    grpc_port: int = 9000  # 0: any free port
    tls: TlsConfig | None = None  # None: plain text
    api_keys_file: str = ""  # lines: hex SHA-256 [tenant [weight]] [quota=…]… [role=…]; empty: none
    tenant_cache_salt: bool = False  # no tenant's prompts are found in another's cache
    reflection: bool | None = None  # None: on without keys, off with keys
    channelz: bool = False  # gRPC's own view of its channels and sockets, the inner ones too
    strict: bool = False  # unknown HTTP fields are errors
    request_timeout_s: float = 600.0  # default and cap of a request's deadline
    keep_alive_s: float = 15.0  # SSE comments after so long without a token; 0: none
    stalled_reader_s: float = 30.0  # a client that takes nothing for so long is ended
    drain_s: float = 30.0  # what running streams get when the ingress stops
    shares_ports: bool = False  # with other ingresses of its machine
    hand_over_s: float = 0.0  # of drain_s, for clients to find other ingresses; 0: there are none

    def __post_init__(self) -> None:
        """Refuse ports and times that cannot be."""
        for port in (self.http_port, self.grpc_port):
            if not 0 <= port <= 65535:
                raise ValueError(f"Got {port = } but expected 0..65535")
        if self.request_timeout_s <= 0:
            raise ValueError(f"Got {self.request_timeout_s = } but expected more than 0")
        if self.tenant_cache_salt and not self.api_keys_file:
            raise ValueError("tenant_cache_salt needs api_keys_file: it names the tenants")
        if self.stalled_reader_s <= 0:
            raise ValueError(f"Got {self.stalled_reader_s = } but expected more than 0")
        if self.keep_alive_s < 0 or self.drain_s < 0:
            raise ValueError(f"Got {self.keep_alive_s = }, {self.drain_s = } but expected >= 0")
        if not 0 <= self.hand_over_s <= self.drain_s:
            raise ValueError(f"Got {self.hand_over_s = } but expected 0..{self.drain_s}")

    @property
    def has_reflection(self) -> bool:
        """Whether gRPC reflection is served."""
        return not self.api_keys_file if self.reflection is None else self.reflection


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The one model this ingress serves."""

    model_id: str  # the name clients use
    path: str  # checkpoint directory with tokenizer.json
    revision: str = ""
    created: int = 0  # seconds since the epoch, shown in /v1/models

    def __post_init__(self) -> None:
        """Refuse a model that cannot be named."""
        if not self.model_id:
            raise ValueError(f"Got {self.model_id = } but expected a name")
