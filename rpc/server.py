"""The gRPC server inside one worker."""

import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from rpc.config import RpcConfig, TlsConfig
from rpc.interceptors import CallInterceptor, TokenInterceptor

_LOGGER = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
# Nearly every message that arrives on a quiet connection would be answered by a ping, to learn how
# much may be under way at once: half of what an idle worker spends on gRPC. It stays 64 KiB now.
NO_PROBES: Final = ("grpc.http2.bdp_probe", 0)
# No maximum connection age: the streams between our own processes live as long as they do.
_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    # A taken port must be an error, not a second listener that steals every other call.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 20_000),
    NO_PROBES,
)

_ANYWHERE = ("192.0.2.1", 9)  # reserved for documentation: never a real peer


class WorkerServer:
    """Serves a worker's services plus grpc.health.v1, from `start` to `stop`, once."""

    def __init__(self, *, bind_host: str, config: RpcConfig, token: str) -> None:
        self._bind_host = bind_host
        self._config = config
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server = grpc.aio.server(
            interceptors=(TokenInterceptor(token), CallInterceptor()), options=_OPTIONS
        )

    async def start(self, add_servicers: Callable[[grpc.aio.Server], None]) -> str:
        """Listen and serve; return host:port as others reach it. OSError when no port is free."""
        add_servicers(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(  # type: ignore[no-untyped-call]
            self._health, self._server
        )
        port = self._listen()
        await self._server.start()
        await self.set_serving(is_serving=True)
        return _join(_advertised_host(self._bind_host), port)

    async def set_serving(self, *, is_serving: bool) -> None:
        """Say through grpc.health.v1 whether this worker takes requests."""
        status = health_pb2.HealthCheckResponse
        await self._health.set("", status.SERVING if is_serving else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s` to end, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)

    def _listen(self) -> int:
        for port in self._config.ports():
            address = _join(self._bind_host, port)
            try:
                if self._config.tls is None:
                    return self._server.add_insecure_port(address)
                return self._server.add_secure_port(address, _credentials(self._config.tls))
            except RuntimeError:
                _LOGGER.info("Cannot listen on %s", address)
        raise OSError(
            f"Got no free port on {self._bind_host} in {self._config.port_range or 'any'}"
        )


def _credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    key, certificate = Path(tls.private_key_file), Path(tls.certificate_file)
    return grpc.ssl_server_credentials(
        [(key.read_bytes(), certificate.read_bytes())],
        root_certificates=Path(tls.ca_file).read_bytes(),
        require_client_auth=True,
    )


def _advertised_host(bind_host: str) -> str:
    """The address peers dial; for all interfaces that of the default route."""
    if bind_host not in {"0.0.0.0", "::"}:
        return bind_host
    # Connecting a datagram socket sends nothing; the kernel picks the address a packet would carry.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ANYWHERE)
        except OSError:  # no route: a machine on its own
            return socket.gethostbyname(socket.gethostname())
        host: str = probe.getsockname()[0]
        return host


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
