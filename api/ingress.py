"""The front of the cluster in one object: HTTP and public gRPC over one router.

start: load keys and tokenizer, listen on both ports; beside others only once it can serve
stop:  not ready -> where there are others, serves on until its clients have turned to them
       -> no new requests -> streams end within drain_s, or are ended -> ports closed
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Set

from starlette.types import ASGIApp

from api import shared_port
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
_JOIN_WITHIN_S = 60.0
_NOTICED_WITHIN_S = 5.0  # a load balancer asks /ready that often
_LOOK_S = 0.1


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

    async def start(self, find_siblings: Callable[[], Set[int]] = frozenset) -> None:
        """Listen on both ports; OSError when one is taken, and then on neither.

        `find_siblings` tells which processes may share them, and makes this one known to these.
        """
        config = self._config
        provider.set_up_tracing("relevo-ingress", self._telemetry)
        provider.add_listener(self.traces)
        if config.shares_ports:
            await self._wait_beside_others(find_siblings)
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
        """Hand clients over, let running streams end, end the rest, close both ports."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._config.drain_s
        if self._config.hand_over_s and self.http_port:
            await self._hand_over(loop.time() + self._config.hand_over_s)
        await self.serving.drain(max(0.0, end_s - loop.time()))
        await asyncio.gather(self._http.stop(), self._grpc.stop(_CLOSE_GRACE_S))
        await self._pulse.stop()
        await self.serving.close()
        provider.remove_listener(self.traces)
        await asyncio.to_thread(self._span_export.shut_down)

    async def _wait_beside_others(self, find_siblings: Callable[[], Set[int]]) -> None:
        config = self._config
        is_shared = [
            shared_port.is_shared(config.bind_host, port, find_siblings)
            for port in (config.http_port, config.grpc_port)
        ]
        if any(is_shared):
            # From the first moment on it gets its part of the connections.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_JOIN_WITHIN_S):
                    while not self.serving.is_ready():  # noqa: ASYNC110
                        await asyncio.sleep(_LOOK_S)

    async def _hand_over(self, end_s: float) -> None:
        """Serve on while clients turn to the other ingresses; until none is left, or `end_s`.

        HTTP's are told with each answer; a connection of gRPC lives no longer than that.
        """
        self.serving.is_leaving = True
        loop = asyncio.get_running_loop()
        ports = (self.http_port, self.grpc_port)
        may_end_s = min(end_s, loop.time() + _NOTICED_WITHIN_S)
        if self._config.shares_ports:
            await shared_port.turn_away(*ports)
            self._http.close_listener()
            self._grpc.close_listener(self.grpc_port)
            may_end_s = loop.time()
        while loop.time() < end_s:
            if loop.time() >= may_end_s and not shared_port.num_connections(*ports):
                return
            await asyncio.sleep(_LOOK_S)
        self._http.close_idle()
