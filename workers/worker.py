"""The life of a worker of either kind: an engine, a gRPC server, a state feed.

What a worker is made of, and who speaks to whom:

    router --Prefill, Decode--> the kind's service -> EngineLoop -> Engine
    prefill worker <--control, links--> decode worker: the kind's end of the KV plane
    ingress <--WatchState-- WorkerState <- EngineLoop

`start` builds it from the bottom up, `stop` ends it from the top down. The KV plane's end and the
service are those of `prefill_workers` and `decode_workers`.
"""

import asyncio
import contextlib
import logging
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import grpc
import torch
from relevo.v1 import common_pb2, state_pb2_grpc

from engine.engine import Engine
from engine.engine_loop import EngineLoop
from engine.load import StepOutput
from engine.request import Request
from faults.plan import identify
from grammar.library import GrammarLibrary
from kv_transfer.control import WorkerRef
from kv_transfer.link_status import LinkStatus
from kv_transfer.peer_link import LinkIdentity
from kv_transfer.place import NOWHERE, Place
from kv_transfer.pool_layout import layout_of, shared_pool_of
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
from telemetry import provider
from telemetry.span_outbox import SpanOutbox
from workers import openmp
from workers.config import WorkerConfig
from workers.core_claim import CoreClaim

logger = logging.getLogger(__name__)

STOP_GRACE_S = 0.5
CLAIM_PAUSES_S = (2.0, 5.0)  # between two tries for cores


class Worker(ABC):
    """Owns every part of one worker, from `start` to `stop`, once."""

    POOL: ClassVar[str]
    OFFERS_KV: ClassVar[bool] = False  # peers on this host may map its blocks

    def __init__(
        self,
        config: WorkerConfig,
        *,
        worker_id: str,
        incarnation: int,
        place: Place = NOWHERE,
        wrap_sink: WrapSink | None = None,
    ) -> None:
        self._config = config
        self._description = WorkerDescription(
            worker_id=worker_id,
            pool=self.POOL,
            incarnation=incarnation,
            address="",  # known once the server listens
            node_id=place.node_id,
            zone=place.zone,
            pid=os.getpid(),
        )
        self._outbox = SpanOutbox()
        self._metrics = WorkerMetrics(pool=self.POOL, worker_id=worker_id, wrap_sink=wrap_sink)
        self._admission = Admission(
            incarnation=incarnation,
            max_waiting=config.max_waiting,
            retry_after_s=self._retry_after_s,
        )
        # What `stop` undoes, last first; a start that failed half way leaves its first half here.
        self._stack = contextlib.AsyncExitStack()
        self._kv_plane = contextlib.AsyncExitStack()  # the kind's own part of it

    async def start(self, clock: StartClock | None = None) -> WorkerDescription:
        """Load the model, measure it, and serve; `clock` has run since the start's beginning."""
        clock = clock or StartClock()
        config, description = self._config, self._description
        identify(pool=self.POOL, worker=description.worker_id)
        provider.set_up_tracing(
            f"relevo-{self.POOL}", config.telemetry, instance=description.worker_id
        )
        provider.add_listener(self._outbox)
        self._stack.callback(provider.remove_listener, self._outbox)
        self._stack.callback(self._metrics.flush)
        self._token = read_token(config.token_file)
        is_kv_shared = self.OFFERS_KV and config.kv_transfer.may_share_memory
        engine = await openmp.compute_once(
            partial(Engine, config.engine, is_kv_shared=is_kv_shared)
        )
        clock.lap("weights")
        self._build(engine)
        await self._start_engine()
        clock.lap("warm_up")
        self._server = WorkerServer(
            bind_host=config.bind_host, config=config.rpc, token=self._token
        )
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
        await self._admission.drain(drain_s, is_busy=self._has_leases)

    async def stop(self) -> None:
        """End everything."""
        await self._stack.aclose()

    @abstractmethod
    def _build_kv_plane(self, engine: Engine, identity: LinkIdentity) -> None:
        """Make this kind's end of the KV plane and its service; what closes it: `_kv_plane`."""

    @abstractmethod
    def _link_statuses(self) -> Sequence[LinkStatus]:
        """Its links, for the state feed."""

    @abstractmethod
    def _num_transferring(self) -> int:
        """Hand-overs that it has a part in now."""

    @abstractmethod
    def _add_service(self, server: grpc.aio.Server) -> None:
        """Add the kind's service to the worker's server."""

    @abstractmethod
    def _export(self) -> None:
        """Bring the KV plane's own series up to date."""

    def _num_promised_tokens(self) -> int:
        """Tokens of hand-overs that have no blocks yet."""
        return 0

    def _has_leases(self) -> bool:
        """Whether a peer still needs its KV."""
        return False

    def _watch_starts(self) -> Callable[[Request], None] | None:
        """Who is told on the engine's thread, before a request's first step."""
        return None

    def _retry_after_s(self) -> float:
        return self._state.retry_after_s()

    def _on_step(self, output: StepOutput) -> None:
        """Runs on the engine's thread, after each of its turns."""
        self._state.on_step(output)

    def _on_failure(self) -> None:
        """Until this process is replaced others shall have the requests."""
        self._admission.close()
        self._state.feed.touch()

    def _build(self, engine: Engine) -> None:
        description = self._description
        identity = LinkIdentity(
            worker=WorkerRef(description.worker_id, description.incarnation),
            layout=layout_of(engine),
            device=torch.device(engine.spec.device),
            place=Place(description.node_id, description.zone),
            shared_pool=shared_pool_of(engine),
        )
        self._stuck_links = identity.stuck_links
        self._engine_loop = EngineLoop(
            engine,
            on_step=self._on_step,
            on_start=self._watch_starts(),
            on_failure=self._on_failure,
        )
        self._grammars = GrammarLibrary.of_checkpoint(
            self._config.engine.model_path,
            vocab_size=engine.vocab_size,
            eos_token_ids=engine.eos_token_ids,
        )
        self._stack.callback(self._grammars.close)
        self._build_kv_plane(engine, identity)
        self._state = WorkerState(
            engine,
            description=description,
            layout=to_message(common_pb2.KVLayout, identity.layout),
            bytes_per_token=identity.layout.bytes_per_token,
            admission=self._admission,
            sources=StateSources(
                heartbeat=self._engine_loop.heartbeat,
                links=self._link_statuses,
                num_transferring=self._num_transferring,
                num_promised_tokens=self._num_promised_tokens,
                metrics=self._metrics,
                spans=self._outbox,
                export=self._export,
            ),
        )

    async def _start_engine(self) -> None:
        self._engine_loop.start()
        self._stack.push_async_callback(self._engine_loop.stop)
        self._stack.push_async_callback(self._kv_plane.aclose)
        await self._engine_loop.call(lambda engine: engine.warm_up())
        keeping = asyncio.create_task(self._keep_to_cores())
        self._stack.callback(keeping.cancel)

    async def _keep_to_cores(self) -> None:
        """Have the engine's threads keep to cores that no other worker of this node claims.

        Where there are too few, this waits: the worker that this one replaces may have them yet.
        """
        num_threads = await self._engine_loop.call(lambda engine: engine.num_threads_to_pin)
        if not num_threads:
            return
        claim = CoreClaim(num_threads)
        self._stack.callback(claim.release)
        while not claim.try_claim():  # noqa: ASYNC110 - nobody tells when a name is free
            # At no fixed pace: two that wait for each other's cores must not go on doing so.
            await asyncio.sleep(random.uniform(*CLAIM_PAUSES_S))
        try:
            await self._engine_loop.call(lambda engine: engine.pin_threads(claim.cores))
        except RuntimeError as error:  # the system has taken cores away, or the engine has ended
            logger.warning("the threads that compute keep to no cores: %s", error)
            claim.release()
        else:
            logger.info("the threads that compute keep to cores %s", claim.cores)

    def _add_servicers(self, server: grpc.aio.Server) -> None:
        self._add_service(server)
        state_pb2_grpc.add_WorkerServiceServicer_to_server(  # type: ignore[no-untyped-call]
            WorkerService(self._state.feed), server
        )
