"""uvicorn inside our process: no signal handlers, a socket bound by us, bounds for strangers.

A request head must end, in bytes and in time. A client must take what is sent to it: no more than
UNSENT_BYTES wait in the kernel and the transport's own buffer in front of it, and when that makes
no room for `stalled_reader_s`, the connection is dropped and whatever runs for it ends.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.config import IngressConfig, TlsConfig

KEEP_ALIVE_S = 90
BACKLOG = 2048
# The gate refuses heads over 32 KiB with a proper answer; this ends one that never ends.
MAX_HEAD_BYTES = 512 * 1024
HEAD_TIMEOUT_S = 30.0
UNSENT_BYTES = 16 * 1024
END_GRACE_S = 5.0


class BoundedProtocol(HttpToolsProtocol):
    """Drops a connection whose request head has no end, or whose client does not read."""

    _num_head_bytes = 0
    _is_in_head = False
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, stalled_reader_s: float, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._stalled_reader_s = stalled_reader_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first head."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Give the client a while to take what waits for it; aborting drops it unsent."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self._stalled_reader_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It reads."""
        super().resume_writing()
        self._stop_stall_timer()

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

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _Server(uvicorn.Server):
    """uvicorn's server, which wakes when it shall end: its own looks ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Let `serve` return soon."""
        self.should_exit = True
        self._ending.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process: Ray or our own main owns them."""
        yield

    async def main_loop(self) -> None:
        """Renew the date of all answers each second until the end."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), 1.0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close what is idle, give running responses a moment, cancel the rest."""
        for server in (*self.servers, *(sockets or ())):
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_GRACE_S):
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        for task in self.server_state.tasks:
            task.cancel()


class HttpServer:
    """Owns the listening socket. Invariant: after `start` it accepts, after `stop` it does not."""

    def __init__(self, app: ASGIApp, config: IngressConfig) -> None:
        self._app = app
        self._ingress_config = config
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen and return the port; OSError when it is taken."""
        ingress_config = self._ingress_config
        host, port = ingress_config.bind_host, ingress_config.http_port
        listener = _listen(host, port, is_shared=ingress_config.shares_ports)
        config = uvicorn.Config(
            self._app,
            http=_bounded_protocol(ingress_config.stalled_reader_s),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            backlog=BACKLOG,
            **_ssl_settings(ingress_config.tls),
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise OSError(f"Got no HTTP server on {host}:{port}")
            await asyncio.sleep(0.01)
        return int(listener.getsockname()[1])

    def close_listener(self) -> None:
        """Take no more connections; those there are go on."""
        if self._server is not None:
            for server in self._server.servers:
                server.close()

    def close_idle(self) -> None:
        """Close every connection, a busy one when its response has ended."""
        if self._server is not None:
            for connection in list(self._server.server_state.connections):
                connection.shutdown()

    async def stop(self) -> None:
        """Close what is idle, give running responses a moment, close the rest."""
        if self._server is None or self._task is None:
            return
        self._server.end()
        await self._task


def _bounded_protocol(stalled_reader_s: float) -> type[asyncio.Protocol]:
    # All that uvicorn does with the class is to call it.
    return cast(
        "type[asyncio.Protocol]", partial(BoundedProtocol, stalled_reader_s=stalled_reader_s)
    )


def _ssl_settings(tls: TlsConfig | None) -> dict[str, Any]:
    if tls is None:
        return {}
    return {
        "ssl_certfile": tls.certificate_file,
        "ssl_keyfile": tls.private_key_file,
        "ssl_ca_certs": tls.client_ca_file or None,
        "ssl_cert_reqs": ssl.CERT_REQUIRED if tls.client_ca_file else ssl.CERT_NONE,
    }


def _listen(host: str, port: int, *, is_shared: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server(
        (host, port), family=family, backlog=BACKLOG, reuse_port=is_shared
    )
    # Accepted sockets inherit it. asyncio would set it only where the socket names its protocol,
    # which these do not; without it head and body, and token after token, wait for 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        # Else the kernel takes megabytes for a client that reads nothing, and nobody notices.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    return listener
