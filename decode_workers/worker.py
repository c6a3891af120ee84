"""One decode worker: an engine whose KV comes from prefill workers or is computed here.

What it is made of, and who speaks to whom:

    router --Decode--> DecodeService -> Decoding -> EngineLoop -> Engine
                                        Decoding -> KVReceiver --Transfer, Fetch, Release--> prefill
                                                        ^==links== prefill
    ingress --SetPeers--> DecodeService -> LinkDialer --OpenLink--> prefill
    ingress <--WatchState-- StateFeed <- EngineReporter <- EngineLoop

`start` builds it from the bottom up, `stop` ends it from the top down. The life cycle of a request
stands in `decoding.py`.
"""

import asyncio
import contextlib
import os
from dataclasses import replace

import grpc
import torch
from relevo.v1 import common_pb2, decode_pb2_grpc, state_pb2, state_pb2_grpc

from decode_workers.config import DecodeWorkerConfig
from decode_workers.decoding import Decoding
from decode_workers.link_channel import DialedLinkChannel
from decode_workers.service import DecodeService
from decode_workers.transfer_channel import TransferChannel
from engine.block_hash import HASH_SCHEME
from engine.engine import Engine
from engine.engine_loop import EngineLoop
from engine.load import BlockEvents, StepOutput
from faults.plan import identify
from kv_transfer.control import PeerInfo, WorkerRef
from kv_transfer.layout import KVLayout
from kv_transfer.link_dialer import LinkDialer
from kv_transfer.peer_link import LinkIdentity
from kv_transfer.receiver import KVReceiver
from rpc.admission import Admission
from rpc.channel import ChannelPool
from rpc.description import WorkerDescription
from rpc.engine_reporter import EngineReporter
from rpc.mirror import to_message
from rpc.pulse import check_pulse
from rpc.server import WorkerServer
from rpc.state_feed import StateFeed
from rpc.token import read_token
from rpc.worker_load import to_worker_load
from rpc.worker_metrics import WorkerMetrics, WrapSink
from rpc.worker_service import WorkerService
from telemetry import metrics, tracing

POOL = "decode"
REFRESH_PERIOD_S = 1.0  # how old the load of an idle engine may be
STOP_GRACE_S = 0.5
TRACING_SHUTDOWN_S = 2.0


class DecodeWorker:
    """Owns every part of one decode worker, from `start` to `stop`, once."""

    def __init__(
        self,
        config: DecodeWorkerConfig,
        *,
        worker_id: str,
        incarnation: int,
        node_id: str = "",
        wrap_sink: WrapSink | None = None,
    ) -> None:
        self._config = config
        self._description = WorkerDescription(
            worker_id=worker_id,
            pool=POOL,
            incarnation=incarnation,
            address="",  # known once the server listens
            node_id=node_id,
            pid=os.getpid(),
        )
        self._metrics = WorkerMetrics(pool=POOL, worker_id=worker_id, wrap_sink=wrap_sink)
        self._admission = Admission(incarnation=incarnation, max_waiting=config.max_waiting)
        # What `stop` undoes, last first; a start that failed half way leaves its first half here.
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> WorkerDescription:
        """Load the model, measure it, and serve."""
        config, description = self._config, self._description
        identify(pool=POOL, worker=description.worker_id)
        tracing.set_up_tracing("relevo-decode", config.telemetry)
        token = read_token(config.token_file)
        engine = await asyncio.to_thread(Engine, config.engine)
        await self._start_engine(engine)
        self._build_kv_plane(engine, token=token)
        self._server = WorkerServer(bind_host=config.bind_host, config=config.rpc, token=token)
        address = await self._server.start(self._add_servicers)
        self._stack.push_async_callback(self._server.stop, STOP_GRACE_S)
        self._stack.callback(self._feed.close)
        self._description = replace(description, address=address)
        self._admission.open()
        self._feed.touch()
        return self._description

    def describe(self) -> WorkerDescription:
        """Who this worker is and where it listens."""
        return self._description

    def check_health(self) -> None:
        """RuntimeError when the engine gave up or shows no life."""
        check_pulse(self._engine_loop.heartbeat(), self._engine_loop.failure)

    async def check_integrity(self) -> None:
        """AssertionError when the engine's books of blocks and requests do not agree."""
        await self._engine_loop.call(lambda engine: engine.check_integrity())

    async def drain(self, drain_s: float) -> None:
        """Take no more requests, wait for the streams; what is left at the end migrates."""
        await self._server.set_serving(is_serving=False)
        self._admission.close()
        self._feed.touch()
        await self._admission.drain(drain_s)

    async def stop(self) -> None:
        """End everything."""
        await self._stack.aclose()
        await asyncio.to_thread(tracing.shut_down, TRACING_SHUTDOWN_S)

    async def _start_engine(self, engine: Engine) -> None:
        self._engine = engine
        self._engine_loop = EngineLoop(engine, on_step=self._on_step)
        self._reporter = EngineReporter(engine, on_report=self._publish)
        self._feed = StateFeed(
            hello=self._hello, load=self._load, metric_samples=self._metric_samples
        )
        self._engine_loop.start()
        self._stack.push_async_callback(self._engine_loop.stop)
        await self._engine_loop.call(lambda engine: engine.warm_up())
        await self._refresh()
        refreshing = asyncio.create_task(self._keep_refreshing())
        self._stack.callback(refreshing.cancel)

    def _build_kv_plane(self, engine: Engine, *, token: str) -> None:
        config, description = self._config.kv_transfer, self._description
        self._layout = _layout_of(engine)
        identity = LinkIdentity(
            worker=WorkerRef(description.worker_id, description.incarnation),
            layout=self._layout,
            device=torch.device(engine.spec.device),
            node_id=description.node_id,
        )
        self._channels = ChannelPool(token=token, config=self._config.rpc)
        self._stack.push_async_callback(self._channels.close)
        self._dialer = LinkDialer(
            identity, config=config, connect=self._connect, on_change=self._feed.touch
        )
        self._stack.push_async_callback(self._dialer.close)
        self._receiver = KVReceiver(
            engine.kv_cache.tensor, layout=self._layout, worker=identity.worker, config=config
        )
        self._stack.push_async_callback(self._receiver.close)
        self._decoding = Decoding(
            engine_loop=self._engine_loop,
            dialer=self._dialer,
            receiver=self._receiver,
            admission=self._admission,
            open_control=self._open_control,
            retry_after_s=self._estimate_wait_s,
        )

    def _add_servicers(self, server: grpc.aio.Server) -> None:
        service = DecodeService(decoding=self._decoding, dialer=self._dialer)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(  # type: ignore[no-untyped-call]
            service, server
        )
        state_pb2_grpc.add_WorkerServiceServicer_to_server(  # type: ignore[no-untyped-call]
            WorkerService(self._feed), server
        )

    def _connect(self, peer: PeerInfo) -> DialedLinkChannel:
        return DialedLinkChannel(self._channels.get(peer.address))

    def _open_control(self, address: str) -> TransferChannel:
        return TransferChannel(
            self._channels.get(address), timeout_s=self._config.kv_transfer.transfer_timeout_s
        )

    # What the engine says

    def _on_step(self, output: StepOutput) -> None:
        """Runs on the engine's thread, before the outputs reach their streams."""
        self._reporter.on_step(output)

    def _publish(self, events: BlockEvents) -> None:
        if events:
            self._feed.publish(removed=events.removed, stored=events.stored, cleared=events.cleared)
        self._feed.touch()

    async def _refresh(self) -> None:
        await self._engine_loop.call(lambda _: None)

    async def _keep_refreshing(self) -> None:
        # The observer of the engine's turns speaks up after each, also after an empty one.
        while True:
            await asyncio.sleep(REFRESH_PERIOD_S)
            with contextlib.suppress(RuntimeError):  # the engine gave up: `check_health` says so
                await self._refresh()

    def _estimate_wait_s(self) -> float:
        load = self._reporter.load
        return load.num_waiting_uncached_tokens / max(1.0, load.prefill_tokens_per_s)

    # What the ingresses are told

    def _hello(self) -> state_pb2.WatchStateResponse.Hello:
        engine = self._engine
        return state_pb2.WatchStateResponse.Hello(
            worker=self._description.to_ref(),
            layout=to_message(common_pb2.KVLayout, self._layout),
            pool=POOL,
            max_num_seqs=engine.config.max_num_seqs,
            max_model_len=engine.max_model_len,
            num_kv_blocks=engine.kv_cache.num_blocks,
            hash_root=engine.hash_root,
            max_num_batched_tokens=engine.config.max_num_batched_tokens,
            kv_bytes_per_token=self._layout.bytes_per_token,
        )

    def _load(self) -> state_pb2.WorkerLoad:
        return to_worker_load(
            self._reporter.load,
            description=self._description,
            state=self._admission.state,
            num_transferring=self._receiver.num_active,
            heartbeat=self._engine_loop.heartbeat(),
            links=self._dialer.statuses(),
        )

    def _metric_samples(self) -> list[state_pb2.MetricSample]:
        counters = self._receiver.counters
        self._metrics.set_load(self._reporter.load, num_transferring=self._receiver.num_active)
        self._metrics.raise_to(metrics.KV_TRANSFER_BYTES, counters.num_bytes)
        self._metrics.raise_to(metrics.KV_DIGEST_MISMATCHES, counters.digest_mismatches)
        self._metrics.raise_to(metrics.KV_FENCED_MESSAGES, counters.fenced_messages)
        self._metrics.raise_each_to(metrics.KV_TRANSFER_FAILURES, "reason", counters.failures)
        return self._metrics.samples()


def _layout_of(engine: Engine) -> KVLayout:
    spec = engine.spec
    return KVLayout(
        model_id=engine.config.model_id or engine.config.model_path,
        model_revision=engine.config.model_revision,
        dtype=spec.dtype,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=spec.block_size,
        hash_scheme=HASH_SCHEME,
    )
