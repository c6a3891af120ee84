"""uvicorn inside our process: no signal handlers, bounded request heads, a socket bound by us."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.config import TlsConfig

KEEP_ALIVE_S = 90
BACKLOG = 2048
# The gate refuses heads over 32 KiB with a proper answer; this ends one that never ends.
MAX_HEAD_BYTES = 512 * 1024
HEAD_TIMEOUT_S = 30.0


class BoundedProtocol(HttpToolsProtocol):
    """Drops a connection whose request head has no end, in bytes or in time."""

    _num_head_bytes = 0
    _is_in_head = False
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first head."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count the bytes of a head that is not complete yet."""
        super().data_received(data)
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("Request head too large.")

    def on_message_begin(self) -> None:
        """Start to count."""
        self._num_head_bytes = 0
        self._is_in_head = True
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Stop counting: a body follows, and it has bounds of its own."""
        self._is_in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def _expect_head(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process: Ray or our own main owns them."""
        yield


class HttpServer:
    """Owns the listening socket. Invariant: after `start` it accepts, after `stop` it does not."""

    def __init__(
        self, app: ASGIApp, *, bind_host: str, port: int, tls: TlsConfig | None = None
    ) -> None:
        self._app = app
        self._bind_host = bind_host
        self._port = port
        self._tls = tls
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen and return the port; OSError when it is taken."""
        listener = _listen(self._bind_host, self._port)
        config = uvicorn.Config(
            self._app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=5,
            backlog=BACKLOG,
            **_ssl_settings(self._tls),
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise OSError(f"Got no HTTP server on {self._bind_host}:{self._port}")
            await asyncio.sleep(0.01)
        port: Any = listener.getsockname()[1]
        return int(port)

    async def stop(self) -> None:
        """Close what is idle, give running responses a moment, close the rest."""
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        await self._task


def _ssl_settings(tls: TlsConfig | None) -> dict[str, Any]:
    if tls is None:
        return {}
    return {
        "ssl_certfile": tls.certificate_file,
        "ssl_keyfile": tls.private_key_file,
        "ssl_ca_certs": tls.client_ca_file or None,
        "ssl_cert_reqs": ssl.CERT_REQUIRED if tls.client_ca_file else ssl.CERT_NONE,
    }


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    # Accepted sockets inherit it. asyncio would set it only where the socket names its protocol,
    # which these do not; without it head and body, and token after token, wait for 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
