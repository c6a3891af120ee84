"""Channels to other workers, one per address, shared by all callers of this process."""

import asyncio
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from rpc.client_metadata import MetadataChannel
from rpc.config import RpcConfig, TlsConfig
from rpc.server import MAX_MESSAGE_BYTES, NO_PROBES

_OPTIONS: Final[tuple[tuple[str, int | str], ...]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # The router decides what is tried again and where.
    ("grpc.enable_retries", 0),
    # A forgotten channel must take its connection along, not leave it in a pool of the process.
    ("grpc.use_local_subchannel_pool", 1),
    # Also the longest time one attempt to connect may take; the default is 20 s.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Our peers are on the cluster's own network; a proxy of the environment is none of ours.
    ("grpc.enable_http_proxy", 0),
    NO_PROBES,
)


class ChannelPool:
    """Owns every channel of this process to workers. Use it on one event loop."""

    def __init__(self, *, token: str, config: RpcConfig) -> None:
        self._token = token
        self._config = config
        self._channels: dict[str, MetadataChannel] = {}
        self._retiring: dict[asyncio.Task[None], MetadataChannel] = {}  # forgotten, still in use

    def get(self, address: str) -> grpc.aio.Channel:
        """Return the channel to host:port; it connects with its first call."""
        channel = self._channels.get(address)
        if channel is None:
            channel = MetadataChannel(_open(address, self._config.tls), token=self._token)
            self._channels[address] = channel
        return channel

    async def forget(self, address: str) -> None:
        """Open no more calls to this address on the present channel; running ones go on.

        They must: gRPC cancels calls by raising CancelledError in whoever reads them.
        """
        channel = self._channels.pop(address, None)
        if channel is not None:
            retiring = asyncio.create_task(channel.retire())
            self._retiring[retiring] = channel
            retiring.add_done_callback(self._retiring.pop)
            # Without running calls the connection is gone when this returns.
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Close all channels and cancel what runs on them."""
        channels = [*self._channels.values(), *self._retiring.values()]
        self._channels.clear()
        for retiring in list(self._retiring):
            retiring.cancel()
        await asyncio.gather(*(channel.close() for channel in channels))


def _open(address: str, tls: TlsConfig | None) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=Path(tls.ca_file).read_bytes(),
        private_key=Path(tls.private_key_file).read_bytes(),
        certificate_chain=Path(tls.certificate_file).read_bytes(),
    )
    options = (*_OPTIONS, ("grpc.ssl_target_name_override", tls.server_name))
    return grpc.aio.secure_channel(address, credentials, options=options)
