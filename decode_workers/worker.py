"""One decode worker: an engine whose KV comes from prefill workers or is computed here.

What it is made of, and who speaks to whom:

    router --Decode--> DecodeService -> Decoding -> EngineLoop -> Engine
                                        Decoding -> KVReceiver --Transfer, Fetch, Release--> prefill
                                                        ^==links== prefill
    ingress --SetPeers--> DecodeService -> LinkDialer --OpenLink--> prefill
    ingress <--WatchState-- WorkerState <- EngineLoop

`start` builds it from the bottom up, `stop` ends it from the top down. The life cycle of a request
stands in `decoding.py`.
"""

import asyncio
import contextlib
import os
from dataclasses import replace

import grpc
import torch
from relevo.v1 import common_pb2, decode_pb2_grpc, state_pb2_grpc

from decode_workers.config import DecodeWorkerConfig
from decode_workers.decoding import Decoding
from decode_workers.link_channel import DialedLinkChannel
from decode_workers.service import DecodeService
from decode_workers.transfer_channel import TransferChannel
from engine.engine import Engine
from engine.engine_loop import EngineLoop
from engine.load import StepOutput
from faults.plan import identify
from grammar.library import GrammarLibrary
from kv_transfer.control import PeerInfo, WorkerRef
from kv_transfer.link_dialer import LinkDialer
from kv_transfer.peer_link import LinkIdentity
from kv_transfer.place import NOWHERE, Place
from kv_transfer.pool_layout import layout_of
from kv_transfer.receiver import KVReceiver
from rpc.admission import Admission
from rpc.channel import ChannelPool
from rpc.description import WorkerDescription
from rpc.mirror import to_message
from rpc.pulse import check_pulse
from rpc.server import WorkerServer
from rpc.start_clock import StartClock
from rpc.token import read_token
from rpc.worker_metrics import WorkerMetrics, WrapSink
from rpc.worker_service import WorkerService
from rpc.worker_state import StateSources, WorkerState
from telemetry import metrics, provider
from telemetry.span_outbox import SpanOutbox

POOL = "decode"
STOP_GRACE_S = 0.5


class DecodeWorker:
    """Owns every part of one decode worker, from `start` to `stop`, once."""

    def __init__(
        self,
        config: DecodeWorkerConfig,
        *,
        worker_id: str,
        incarnation: int,
        place: Place = NOWHERE,
        wrap_sink: WrapSink | None = None,
    ) -> None:
        self._config = config
        self._wrap_sink = wrap_sink
        self._description = WorkerDescription(
            worker_id=worker_id,
            pool=POOL,
            incarnation=incarnation,
            address="",  # known once the server listens
            node_id=place.node_id,
            zone=place.zone,
            pid=os.getpid(),
        )
        self._outbox = SpanOutbox()
        self._metrics = WorkerMetrics(pool=POOL, worker_id=worker_id, wrap_sink=wrap_sink)
        self._admission = Admission(
            incarnation=incarnation,
            max_waiting=config.max_waiting,
            retry_after_s=self._retry_after_s,
        )
        # What `stop` undoes, last first; a start that failed half way leaves its first half here.
        self._stack = contextlib.AsyncExitStack()

    async def start(self, clock: StartClock | None = None) -> WorkerDescription:
        """Load the model, measure it, and serve; `clock` has run since the start's beginning."""
        clock = clock or StartClock()
        config, description = self._config, self._description
        identify(pool=POOL, worker=description.worker_id)
        provider.set_up_tracing(f"relevo-{POOL}", config.telemetry, instance=description.worker_id)
        provider.add_listener(self._outbox)
        self._stack.callback(provider.remove_listener, self._outbox)
        token = read_token(config.token_file)
        engine = await asyncio.to_thread(Engine, config.engine)
        clock.lap("weights")
        self._build_kv_plane(engine, token=token)
        await self._start_engine()
        clock.lap("warm_up")
        self._server = WorkerServer(bind_host=config.bind_host, config=config.rpc, token=token)
        address = await self._server.start(self._add_servicers)
        self._stack.push_async_callback(self._server.stop, STOP_GRACE_S)
        self._stack.callback(self._state.feed.close)
        clock.lap("server")
        self._description = replace(description, address=address, start_s=clock.parts_s)
        self._admission.open()
        self._state.feed.touch()
        return self._description

    def describe(self) -> WorkerDescription:
        """Who this worker is and where it listens."""
        return self._description

    def check_health(self) -> None:
        """RuntimeError when only a new process helps: the engine or a link hangs or gave up."""
        check_pulse(self._engine_loop.heartbeat(), self._engine_loop.failure)
        if self._stuck_links:
            raise RuntimeError(f"the abort of link {self._stuck_links[0]} does not return")

    async def check_integrity(self) -> None:
        """AssertionError when the engine's books of blocks and requests do not agree."""
        await self._engine_loop.call(lambda engine: engine.check_integrity())

    async def drain(self, drain_s: float) -> None:
        """Take no more requests, wait for the streams; what is left at the end migrates."""
        await self._server.set_serving(is_serving=False)
        self._admission.close()
        self._state.feed.touch()
        await self._admission.drain(drain_s)

    async def stop(self) -> None:
        """End everything."""
        await self._stack.aclose()

    def _build_kv_plane(self, engine: Engine, *, token: str) -> None:
        config, description = self._config.kv_transfer, self._description
        layout = layout_of(engine)
        identity = LinkIdentity(
            worker=WorkerRef(description.worker_id, description.incarnation),
            layout=layout,
            device=torch.device(engine.spec.device),
            place=Place(description.node_id, description.zone),
        )
        self._stuck_links = identity.stuck_links
        self._channels = ChannelPool(token=token, config=self._config.rpc)
        self._dialer = LinkDialer(
            identity,
            config=config,
            connect=lambda peer: DialedLinkChannel(self._channels.get(peer.address)),
            on_change=self._touch,
        )
        self._engine_loop = EngineLoop(engine, on_step=self._on_step)
        self._receiver = KVReceiver(
            engine.kv_cache.tensor,
            layout=layout,
            worker=identity.worker,
            config=config,
            end_quarantine=self._engine_loop.end_quarantine,
        )
        self._grammars = GrammarLibrary.of_checkpoint(
            self._config.engine.model_path,
            vocab_size=engine.vocab_size,
            eos_token_ids=engine.eos_token_ids,
        )
        self._stack.callback(self._grammars.close)
        self._state = WorkerState(
            engine,
            description=description,
            layout=to_message(common_pb2.KVLayout, layout),
            bytes_per_token=layout.bytes_per_token,
            admission=self._admission,
            sources=StateSources(
                wrap_sink=self._wrap_sink,
                heartbeat=self._engine_loop.heartbeat,
                links=self._dialer.statuses,
                num_transferring=lambda: self._receiver.num_active,
                num_promised_tokens=lambda: self._receiver.num_promised_tokens,
                metrics=self._metrics,
                spans=self._outbox,
                export=self._export,
            ),
        )
        self._decoding = Decoding(
            engine_loop=self._engine_loop,
            dialer=self._dialer,
            receiver=self._receiver,
            admission=self._admission,
            open_control=self._open_control,
            worker_metrics=self._metrics,
        )

    async def _start_engine(self) -> None:
        self._engine_loop.start()
        self._stack.push_async_callback(self._engine_loop.stop)
        self._stack.push_async_callback(self._channels.close)
        self._stack.push_async_callback(self._dialer.close)
        self._stack.push_async_callback(self._receiver.close)
        await self._engine_loop.call(lambda engine: engine.warm_up())
        refreshing = self._state.keep_fresh(lambda: self._engine_loop.call(lambda _: None))
        self._stack.callback(asyncio.create_task(refreshing).cancel)

    def _retry_after_s(self) -> float:
        return self._state.retry_after_s()

    def _on_step(self, output: StepOutput) -> None:
        """Runs on the engine's thread, after each of its turns."""
        self._state.on_step(output)

    def _touch(self) -> None:
        """Tell the ingresses about a link at once."""
        self._state.feed.touch()

    def _add_servicers(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(  # type: ignore[no-untyped-call]
            DecodeService(decoding=self._decoding, dialer=self._dialer, grammars=self._grammars),
            server,
        )
        state_pb2_grpc.add_WorkerServiceServicer_to_server(  # type: ignore[no-untyped-call]
            WorkerService(self._state.feed), server
        )

    def _open_control(self, peer: PeerInfo) -> TransferChannel:
        return TransferChannel(
            self._channels.get(peer.address),
            ends=frozenset({self._description.worker_id, peer.worker.worker_id}),
            timeout_s=self._config.kv_transfer.transfer_timeout_s,
        )

    def _export(self) -> None:
        counters = self._receiver.counters
        self._metrics.raise_to(metrics.KV_TRANSFER_BYTES, counters.num_bytes)
        self._metrics.raise_to(metrics.KV_DIGEST_MISMATCHES, counters.digest_mismatches)
        self._metrics.raise_to(metrics.KV_FENCED_MESSAGES, counters.fenced_messages)
        self._metrics.raise_each_to(metrics.KV_TRANSFER_FAILURES, "reason", counters.failures)
