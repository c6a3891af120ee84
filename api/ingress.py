"""The front of the cluster in one object: HTTP and public gRPC over one router.

start: load keys and tokenizer, listen on both ports
stop:  not ready, no new requests -> streams end within drain_s, or are ended -> ports closed
"""

import asyncio
import logging

from api.api_keys import ApiKeys
from api.config import IngressConfig, ModelConfig
from api.grpc_server import GrpcServer
from api.http_app import build_http_app
from api.http_server import HttpServer
from api.serving import Serving
from api.tokenizer import Tokenizer
from api.upstream import Upstream
from telemetry.prometheus_sink import PrometheusSink

_LOGGER = logging.getLogger(__name__)
_CLOSE_GRACE_S = 2.0


class Ingress:
    """Owns both servers. The router is handed in started and is not stopped here."""

    def __init__(
        self,
        config: IngressConfig,
        model_config: ModelConfig,
        *,
        router: Upstream,
        sink: PrometheusSink,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._config = config
        keys = ApiKeys(config.api_keys_file)
        self.serving = Serving(
            config,
            model_config,
            tokenizer=tokenizer or Tokenizer.load(model_config.path),
            upstream=router,
        )
        self._app = build_http_app(self.serving, keys=keys, sink=sink)
        self._http = HttpServer(
            self._app, bind_host=config.bind_host, port=config.http_port, tls=config.tls
        )
        self._grpc = GrpcServer(self.serving, keys)
        self.http_port = 0  # known after start
        self.grpc_port = 0

    @property
    def routes(self) -> tuple[str, ...]:
        """The paths of the HTTP server."""
        return self._app.routes

    async def start(self) -> None:
        """Listen on both ports; OSError when one is taken, and then on neither."""
        config = self._config
        self.http_port = await self._http.start()
        try:
            self.grpc_port = await self._grpc.start(
                bind_host=config.bind_host, port=config.grpc_port
            )
        except OSError:
            await self._http.stop()
            raise
        _LOGGER.info("HTTP on %s:%d, gRPC on :%d", config.bind_host, self.http_port, self.grpc_port)

    async def stop(self) -> None:
        """Let running streams end, end the rest, close both ports."""
        await self.serving.drain(self._config.drain_s)
        await asyncio.gather(self._http.stop(), self._grpc.stop(_CLOSE_GRACE_S))
        await self.serving.close()
