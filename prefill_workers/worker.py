"""One prefill worker: an engine whose KV goes to decode workers.

What it is made of, and who speaks to whom:

    router --Prefill--> PrefillService -> HandOver -> EngineLoop -> Engine
    decode --Transfer, Fetch, Release--> PrefillService -> KVSender --links--> decode
    decode --OpenLink--> PrefillService -> LinkAcceptor
    ingress <--WatchState-- WorkerState <- EngineLoop

`start` builds it from the bottom up, `stop` ends it from the top down. The life cycle of a request
stands in `hand_over.py`.
"""

import asyncio
import contextlib
import os
from dataclasses import replace

import grpc
import torch
from relevo.v1 import common_pb2, prefill_pb2_grpc, state_pb2_grpc

from engine.engine import Engine
from engine.engine_loop import EngineLoop
from engine.load import StepOutput
from faults.plan import identify
from grammar.library import GrammarLibrary
from kv_transfer.control import WorkerRef
from kv_transfer.link_acceptor import LinkAcceptor
from kv_transfer.peer_link import LinkIdentity
from kv_transfer.place import NOWHERE, Place
from kv_transfer.pool_layout import layout_of, shared_pool_of
from kv_transfer.sender import KVSender
from prefill_workers.config import PrefillWorkerConfig
from prefill_workers.hand_over import HandOver, Starts
from prefill_workers.service import PrefillService
from rpc.admission import Admission
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

POOL = "prefill"
STOP_GRACE_S = 0.5


class PrefillWorker:
    """Owns every part of one prefill worker, from `start` to `stop`, once."""

    def __init__(
        self,
        config: PrefillWorkerConfig,
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
        engine = await asyncio.to_thread(
            Engine, config.engine, is_kv_shared=config.kv_transfer.may_share_memory
        )
        clock.lap("weights")
        self._build_kv_plane(engine)
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
        """Take no more requests, wait for streams and leases; what is left at the end migrates."""
        await self._server.set_serving(is_serving=False)
        self._admission.close()
        self._state.feed.touch()
        await self._admission.drain(drain_s, is_busy=lambda: self._sender.num_open > 0)

    async def stop(self) -> None:
        """End everything."""
        await self._stack.aclose()

    def _build_kv_plane(self, engine: Engine) -> None:
        config, description = self._config.kv_transfer, self._description
        layout = layout_of(engine)
        identity = LinkIdentity(
            worker=WorkerRef(description.worker_id, description.incarnation),
            layout=layout,
            device=torch.device(engine.spec.device),
            place=Place(description.node_id, description.zone),
            shared_pool=shared_pool_of(engine),
        )
        self._stuck_links = identity.stuck_links
        self._starts = Starts()
        self._engine_loop = EngineLoop(
            engine, on_step=self._on_step, on_start=self._starts.on_start
        )
        self._grammars = GrammarLibrary.of_checkpoint(
            self._config.engine.model_path,
            vocab_size=engine.vocab_size,
            eos_token_ids=engine.eos_token_ids,
        )
        self._stack.callback(self._grammars.close)
        self._acceptor = LinkAcceptor(identity, config=config)
        self._sender = KVSender(
            engine.kv_cache.tensor,
            layout=layout,
            config=config,
            acceptor=self._acceptor,
            end_quarantine=self._engine_loop.end_quarantine,
        )
        self._state = WorkerState(
            engine,
            description=description,
            layout=to_message(common_pb2.KVLayout, layout),
            bytes_per_token=layout.bytes_per_token,
            admission=self._admission,
            sources=StateSources(
                wrap_sink=self._wrap_sink,
                heartbeat=self._engine_loop.heartbeat,
                links=self._acceptor.statuses,
                num_transferring=lambda: self._sender.num_open,
                metrics=self._metrics,
                spans=self._outbox,
                export=self._export,
            ),
        )
        self._hand_over = HandOver(
            engine_loop=self._engine_loop,
            starts=self._starts,
            sender=self._sender,
            admission=self._admission,
            worker_id=description.worker_id,
        )

    async def _start_engine(self) -> None:
        self._engine_loop.start()
        self._stack.push_async_callback(self._engine_loop.stop)
        self._stack.push_async_callback(self._sender.close)
        self._stack.push_async_callback(self._acceptor.close)
        await self._engine_loop.call(lambda engine: engine.warm_up())
        refreshing = self._state.keep_fresh(lambda: self._engine_loop.call(lambda _: None))
        self._stack.callback(asyncio.create_task(refreshing).cancel)

    def _retry_after_s(self) -> float:
        return self._state.retry_after_s()

    def _on_step(self, output: StepOutput) -> None:
        """Runs on the engine's thread, after each of its turns."""
        self._state.on_step(output)

    def _add_servicers(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(  # type: ignore[no-untyped-call]
            PrefillService(
                hand_over=self._hand_over,
                sender=self._sender,
                acceptor=self._acceptor,
                grammars=self._grammars,
            ),
            server,
        )
        state_pb2_grpc.add_WorkerServiceServicer_to_server(  # type: ignore[no-untyped-call]
            WorkerService(self._state.feed), server
        )

    def _export(self) -> None:
        counters = self._sender.counters
        self._metrics.set(metrics.KV_LEASES_OPEN, self._sender.num_open)
        self._metrics.raise_to(metrics.LEASE_EXPIRED, counters.leases_expired)
        self._metrics.raise_to(metrics.KV_FENCED_MESSAGES, counters.fenced_messages)
        self._metrics.raise_each_to(metrics.KV_TRANSFER_FAILURES, "reason", counters.failures)
