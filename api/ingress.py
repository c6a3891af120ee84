"""The front of the cluster in one object: HTTP and public gRPC over one router.

start: load keys and tokenizer, listen on both ports
stop:  not ready, no new requests -> streams end within drain_s, or are ended -> ports closed
"""

import asyncio
import logging

from starlette.types import ASGIApp

from api.api_keys import ApiKeys
from api.config import IngressConfig, ModelConfig
from api.grpc_server import GrpcServer
from api.http_app import build_http_app
from api.http_server import HttpServer
from api.operations.pulse import Pulse
from api.operations.request_log import RequestLog
from api.serving import Serving
from api.tokenizer import Tokenizer
from api.upstream import Upstream
from telemetry import provider
from telemetry.config import TelemetryConfig
from telemetry.metrics import Metrics
from telemetry.prometheus_sink import PrometheusSink
from telemetry.span_export import SpanExport
from telemetry.trace_store import TraceStore

_LOGGER = logging.getLogger(__name__)
_CLOSE_GRACE_S = 2.0


class Ingress:
    """Owns both servers. The router is handed in started and is not stopped here."""

    def __init__(  # noqa: PLR0913 - the composition root of this room
        self,
        config: IngressConfig,
        model_config: ModelConfig,
        *,
        router: Upstream,
        sink: PrometheusSink,
        metrics: Metrics | None = None,  # writes to `sink`, and where else numbers shall go
        telemetry: TelemetryConfig | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._config = config
        keys = ApiKeys(config.api_keys_file)
        self._telemetry = telemetry or TelemetryConfig()
        self.serving = Serving(
            config,
            model_config,
            tokenizer=tokenizer or Tokenizer.load(model_config.path),
            upstream=router,
            request_log=RequestLog(self._telemetry.request_log_file),
            captures_content=self._telemetry.capture_content,
        )
        self._span_export = SpanExport(self._telemetry.otlp_endpoint)
        self.traces = TraceStore(
            max_requests=self._telemetry.keep_traces,
            slow_first_token_s=self._telemetry.slow_first_token_s,
            export=self._span_export.send,
        )
        self._pulse = Pulse(router, sink, metrics or Metrics(sink))
        self._app = build_http_app(
            self.serving, keys=keys, sink=sink, traces=self.traces, pulse=self._pulse
        )
        self._http = HttpServer(self._app, config)
        self._grpc = GrpcServer(self.serving, keys)
        self.http_port = 0  # known after start
        self.grpc_port = 0

    @property
    def app(self) -> ASGIApp:
        """The HTTP face, to be called without a socket."""
        return self._app

    @property
    def routes(self) -> tuple[str, ...]:
        """The paths of the HTTP server."""
        return self._app.routes

    @property
    def stats(self) -> tuple[int, str]:
        """Number and text of the last line of statistics; 0 while there was nothing to tell."""
        return self._pulse.num_stats, self._pulse.stats

    async def start(self) -> None:
        """Listen on both ports; OSError when one is taken, and then on neither."""
        config = self._config
        provider.set_up_tracing("relevo-ingress", self._telemetry)
        provider.add_listener(self.traces)
        self.http_port = await self._http.start()
        try:
            self.grpc_port = await self._grpc.start(
                bind_host=config.bind_host, port=config.grpc_port
            )
        except OSError:
            await self._http.stop()
            raise
        self._pulse.start()
        _LOGGER.info("Routes: %s", " ".join(self.routes))
        _LOGGER.info("HTTP on %s:%d, gRPC on :%d", config.bind_host, self.http_port, self.grpc_port)

    async def stop(self) -> None:
        """Let running streams end, end the rest, close both ports."""
        await self.serving.drain(self._config.drain_s)
        await asyncio.gather(self._http.stop(), self._grpc.stop(_CLOSE_GRACE_S))
        await self._pulse.stop()
        await self.serving.close()
        provider.remove_listener(self.traces)
        await asyncio.to_thread(self._span_export.shut_down)
