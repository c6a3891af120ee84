"""One prefill worker: an engine whose KV goes to decode workers.

What it is made of beside what every worker is, and who speaks to whom:

    router --Prefill--> PrefillService -> HandOver -> EngineLoop -> Engine
    decode --Transfer, Fetch, Release--> PrefillService -> KVSender --links--> decode
    decode --OpenLink--> PrefillService -> LinkAcceptor

The life cycle of a request stands in `hand_over.py`.
"""

from collections.abc import Callable, Sequence

import grpc
from relevo.v1 import prefill_pb2_grpc

from engine.engine import Engine
from engine.request import Request
from kv_transfer.link_acceptor import LinkAcceptor
from kv_transfer.link_status import LinkStatus
from kv_transfer.peer_link import LinkIdentity
from kv_transfer.sender import KVSender
from prefill_workers.hand_over import HandOver, Starts
from prefill_workers.service import PrefillService
from telemetry import metrics
from workers.worker import Worker


class PrefillWorker(Worker):
    """Offers what it computes, and keeps it until it is fetched."""

    POOL = "prefill"
    OFFERS_KV = True

    def _build_kv_plane(self, engine: Engine, identity: LinkIdentity) -> None:
        config = self._config.kv_transfer
        self._acceptor = LinkAcceptor(identity, config=config)
        self._sender = KVSender(
            engine.kv_cache.tensor,
            layout=identity.layout,
            config=config,
            acceptor=self._acceptor,
            end_quarantine=self._engine_loop.end_quarantine,
        )
        self._kv_plane.push_async_callback(self._sender.close)
        self._kv_plane.push_async_callback(self._acceptor.close)
        self._hand_over = HandOver(
            engine_loop=self._engine_loop,
            starts=self._starts,
            sender=self._sender,
            admission=self._admission,
            worker_id=self._description.worker_id,
        )

    def _watch_starts(self) -> Callable[[Request], None]:
        self._starts = Starts()
        return self._starts.on_start

    def _has_leases(self) -> bool:
        return self._sender.num_open > 0

    def _link_statuses(self) -> Sequence[LinkStatus]:
        return self._acceptor.statuses()

    def _num_transferring(self) -> int:
        return self._sender.num_open

    def _add_service(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(  # type: ignore[no-untyped-call]
            PrefillService(
                hand_over=self._hand_over,
                sender=self._sender,
                acceptor=self._acceptor,
                grammars=self._grammars,
            ),
            server,
        )

    def _export(self) -> None:
        counters = self._sender.counters
        self._metrics.set(metrics.KV_LEASES_OPEN, self._sender.num_open)
        self._metrics.raise_to(metrics.LEASE_EXPIRED, counters.leases_expired)
        self._metrics.raise_to(metrics.KV_FENCED_MESSAGES, counters.fenced_messages)
