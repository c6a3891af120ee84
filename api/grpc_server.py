"""The public gRPC server: our service, health, reflection, channelz."""

import socket
from pathlib import Path

import grpc
import grpc.aio
from grpc_channelz.v1.channelz import add_channelz_servicer
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from relevo.v1 import inference_pb2, inference_pb2_grpc

from api import shared_port
from api.api_keys import ApiKeys
from api.config import IngressConfig
from api.grpc_gate import GrpcGate
from api.grpc_health import HealthService
from api.grpc_service import InferenceService
from api.serving import Serving

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
HEALTH = "grpc.health.v1.Health"

# The life of a connection beside the hand-over in which it has to end: gRPC adds up to a tenth, and
# a machine may be busy.
_AGE_OF_HAND_OVER = 2 / 3

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 32 * 1024),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 20_000),
    # Outlasts any request's deadline.
    ("grpc.max_connection_age_grace_ms", 11 * 60_000),
)


class GrpcServer:
    """Owns the public gRPC port, from `start` to `stop`, once."""

    def __init__(self, serving: Serving, keys: ApiKeys) -> None:
        self._serving = serving
        self._server = grpc.aio.server(
            interceptors=(GrpcGate(keys),), options=(*_OPTIONS, *_options_of(serving.config))
        )

    async def start(self, *, bind_host: str, port: int) -> int:
        """Listen and return the port; OSError when it is taken."""
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(  # type: ignore[no-untyped-call]
            InferenceService(self._serving), self._server
        )
        health = HealthService(self._serving.is_ready, services=frozenset({SERVICE, HEALTH}))
        health_pb2_grpc.add_HealthServicer_to_server(health, self._server)  # type: ignore[no-untyped-call]
        if self._serving.config.has_reflection:
            names = (SERVICE, HEALTH, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)  # type: ignore[no-untyped-call]
        if self._serving.config.channelz:
            add_channelz_servicer(self._server)  # type: ignore[no-untyped-call]
        host = f"[{bind_host}]" if ":" in bind_host else bind_host
        try:
            bound = self._listen(f"{host}:{port}")
        except RuntimeError as error:
            raise OSError(
                f"Got {port = } for gRPC but it cannot be listened on: {error}"
            ) from error
        await self._server.start()
        return bound

    def _listen(self, address: str) -> int:
        tls = self._serving.config.tls
        if tls is None:
            return int(self._server.add_insecure_port(address))
        key, certificate = Path(tls.private_key_file), Path(tls.certificate_file)
        client_ca = Path(tls.client_ca_file).read_bytes() if tls.client_ca_file else None
        credentials = grpc.ssl_server_credentials(
            [(key.read_bytes(), certificate.read_bytes())],
            root_certificates=client_ca,
            require_client_auth=client_ca is not None,
        )
        return int(self._server.add_secure_port(address, credentials))

    def close_listener(self, port: int) -> None:
        """Take no more connections; those there are go on. The library itself can only do both."""
        for listener in shared_port.own_listeners(port):
            with listener:
                listener.shutdown(socket.SHUT_RDWR)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones a while, then cancel them."""
        await self._server.stop(grace_s)


def _options_of(config: IngressConfig) -> tuple[tuple[str, int], ...]:
    # A connection that has lived so long is told to go away, and every call on it is served; this
    # lets load spread after scaling. To stop a server cancels what comes at that moment: where
    # clients can be handed over, all their connections have been told before.
    age_s = config.hand_over_s * _AGE_OF_HAND_OVER or 30 * 60.0
    return (
        # 0: a taken port must be an error, not a second listener that steals every other call.
        ("grpc.so_reuseport", int(config.shares_ports)),
        ("grpc.max_connection_age_ms", round(age_s * 1000)),
    )
