"""One decode worker: an engine whose KV comes from prefill workers or is computed here.

What it is made of beside what every worker is, and who speaks to whom:

    router --Decode--> DecodeService -> Decoding -> EngineLoop -> Engine
                                        Decoding -> KVReceiver --Transfer, Fetch, Release--> prefill
                                                        ^==links== prefill
    ingress --SetPeers--> DecodeService -> LinkDialer --OpenLink--> prefill

The life cycle of a request stands in `decoding.py`.
"""

from collections.abc import Sequence

import grpc
from relevo.v1 import decode_pb2_grpc

from decode_workers.decoding import Decoding
from decode_workers.link_channel import DialedLinkChannel
from decode_workers.service import DecodeService
from decode_workers.transfer_channel import TransferChannel
from engine.engine import Engine
from kv_transfer.control import PeerInfo
from kv_transfer.link_dialer import LinkDialer
from kv_transfer.link_status import LinkStatus
from kv_transfer.peer_link import LinkIdentity
from kv_transfer.receiver import KVReceiver
from rpc.channel import ChannelPool
from telemetry import metrics
from workers.worker import Worker


class DecodeWorker(Worker):
    """Fetches the KV of its requests, or computes it, and streams tokens."""

    POOL = "decode"

    def _build_kv_plane(self, engine: Engine, identity: LinkIdentity) -> None:
        config = self._config.kv_transfer
        self._channels = ChannelPool(token=self._token, config=self._config.rpc)
        self._dialer = LinkDialer(
            identity,
            config=config,
            connect=lambda peer: DialedLinkChannel(self._channels.get(peer.address)),
            on_change=self._touch,
        )
        self._receiver = KVReceiver(
            engine.kv_cache.tensor,
            layout=identity.layout,
            worker=identity.worker,
            config=config,
            end_quarantine=self._engine_loop.end_quarantine,
        )
        self._kv_plane.push_async_callback(self._channels.close)
        self._kv_plane.push_async_callback(self._dialer.close)
        self._kv_plane.push_async_callback(self._receiver.close)
        self._decoding = Decoding(
            engine_loop=self._engine_loop,
            dialer=self._dialer,
            receiver=self._receiver,
            admission=self._admission,
            open_control=self._open_control,
            worker_metrics=self._metrics,
        )

    def _touch(self) -> None:
        """Tell the ingresses about a link at once."""
        self._state.feed.touch()

    def _open_control(self, peer: PeerInfo) -> TransferChannel:
        return TransferChannel(
            self._channels.get(peer.address),
            ends=frozenset({self._description.worker_id, peer.worker.worker_id}),
            timeout_s=self._config.kv_transfer.transfer_timeout_s,
        )

    def _link_statuses(self) -> Sequence[LinkStatus]:
        return self._dialer.statuses()

    def _num_transferring(self) -> int:
        return self._receiver.num_active

    def _num_promised_tokens(self) -> int:
        return self._receiver.num_promised_tokens

    def _add_service(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(  # type: ignore[no-untyped-call]
            DecodeService(decoding=self._decoding, dialer=self._dialer, grammars=self._grammars),
            server,
        )

    def _export(self) -> None:
        counters = self._receiver.counters
        self._metrics.raise_to(metrics.KV_TRANSFER_BYTES, counters.num_bytes)
        self._metrics.raise_to(metrics.KV_DIGEST_MISMATCHES, counters.digest_mismatches)
        self._metrics.raise_each_to(metrics.KV_TRANSFER_FAILURES, "reason", counters.failures)
