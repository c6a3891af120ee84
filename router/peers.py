"""Tells one decode worker which prefill workers live, so that it links to them."""

import asyncio
import logging
from collections.abc import Callable

import grpc
from relevo.v1 import common_pb2, decode_pb2, decode_pb2_grpc

from rpc.channel import ChannelPool

REPEAT_S = 10.0  # a worker believes a view for 30 s
RETRY_S = 0.5
CALL_TIMEOUT_S = 3.0

_LOGGER = logging.getLogger(__name__)


class PeerAnnouncer:
    """Sends the whole view on every change and every 10 s, until `run` is cancelled."""

    def __init__(
        self,
        *,
        address: str,
        channels: ChannelPool,
        ingress_id: str,
        list_peers: Callable[[], list[common_pb2.Peer]],
    ) -> None:
        self._address = address
        self._channels = channels
        self._ingress_id = ingress_id
        self._list_peers = list_peers
        self._changed = asyncio.Event()

    def announce(self) -> None:
        """The view changed."""
        self._changed.set()

    async def run(self) -> None:
        """Keep the worker informed; an unreachable one is asked again."""
        while True:
            self._changed.clear()
            pause_s = REPEAT_S if await self._send() else RETRY_S
            try:
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _send(self) -> bool:
        request = decode_pb2.SetPeersRequest(
            ingress_id=self._ingress_id, prefill_workers=self._list_peers()
        )
        stub = decode_pb2_grpc.DecodeServiceStub(  # type: ignore[no-untyped-call]
            self._channels.get(self._address)
        )
        try:
            await stub.SetPeers(request, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            _LOGGER.debug("SetPeers to %s failed: %r", self._address, error)
            return False
        return True
