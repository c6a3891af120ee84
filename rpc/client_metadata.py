"""A channel that adds the token, the trace context and the request id to every call.

It wraps the channel instead of using gRPC's client interceptors: those put a second call object
and a queue between a stream and its reader, and every token passes there.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from rpc.interceptors import REQUEST_ID_KEY, TOKEN_KEY
from telemetry import logs, tracing

Metadata = list[tuple[str, str | bytes]]


def outgoing_metadata(token: str) -> Metadata:
    """Return what every call of ours carries."""
    metadata: Metadata = [(TOKEN_KEY, token)]
    tracing.inject(metadata)
    request_id = logs.request_id.get()
    if request_id.isascii() and request_id.isprintable() and request_id != "-":
        metadata.append((REQUEST_ID_KEY, request_id))
    return metadata


class MetadataChannel(grpc.aio.Channel):
    """Passes everything on to a channel of its own; calls start with our metadata added."""

    def __init__(self, channel: grpc.aio.Channel, *, token: str) -> None:
        self._channel = channel
        self._token = token
        self._num_calls = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_closed = False

    async def retire(self) -> None:
        """Refuse new calls, wait for the running ones to end, close."""
        self._is_closed = True
        await self._is_idle.wait()
        await self._channel.close()

    def _labelled(self, multi_callable: Callable[..., Any]) -> Any:
        def start(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            if self._is_closed:
                # To whoever kept a stub for too long the peer has gone.
                raise grpc.aio.AioRpcError(
                    grpc.StatusCode.UNAVAILABLE,
                    grpc.aio.Metadata(),
                    grpc.aio.Metadata(),
                    details="this channel was closed",
                )
            complete = [*(metadata or ()), *outgoing_metadata(self._token)]
            call = multi_callable(*args, metadata=complete, **kwargs)
            self._num_calls += 1
            self._is_idle.clear()
            call.add_done_callback(self._call_ended)
            return call

        return start

    def _call_ended(self, _call: Any) -> None:
        self._num_calls -= 1
        if self._num_calls == 0:
            self._is_idle.set()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """Make a callable for one message each way."""
        return self._labelled(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """Make a callable for one message there and many back."""
        return self._labelled(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """Make a callable for many messages there and one back."""
        return self._labelled(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """Make a callable for many messages each way."""
        return self._labelled(self._channel.stream_stream(*args, **kwargs))

    async def close(self, grace: float | None = None) -> None:
        """Close the channel; running calls are cancelled after `grace` seconds."""
        self._is_closed = True
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return whether the channel is connected."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Return when the state is another one."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Return when the channel is connected."""
        await self._channel.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()
