"""Fake workers for tests of the router and the faces: real gRPC servers, scripted behaviour.

Tokens are a function of the client's prompt and the position, so that every worker, and every
replay, agrees about them. Attributes may be changed while a worker serves.
"""

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from relevo.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    state_pb2,
    state_pb2_grpc,
)

from rpc.config import RpcConfig
from rpc.description import WorkerDescription
from rpc.errors import AdmissionRefusedError, RequestFailedError, StaleWorkerError
from rpc.server import WorkerServer

TOKEN = "token-of-the-fake-cluster"
HASH_ROOT = b"root" * 8
BLOCK_SIZE = 4
_incarnations = itertools.count(1000)

State = state_pb2.WatchStateResponse


def token_at(prompt: Sequence[int], position: int) -> int:
    """The token every fake worker gives at an absolute position."""
    return 100 + (sum(prompt) * 31 + position * 7) % 800


def expected_tokens(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The whole output of a request."""
    return [token_at(prompt, len(prompt) + offset) for offset in range(num_tokens)]


@dataclass(eq=False)
class FakeWorker:
    """What both kinds share: server, identity, state stream, and how to fail."""

    worker_id: str
    incarnation: int = field(default_factory=lambda: next(_incarnations))
    max_num_seqs: int = 16
    max_model_len: int = 512
    num_kv_blocks: int = 256
    tick_s: float = 0.1  # of the state stream
    num_refusals: int = 0  # requests to refuse as full
    num_stale: int = 0  # requests to refuse as meant for another process
    num_skipped: int = 0  # state messages to lose: a gap
    is_frozen: bool = False  # says nothing more on any stream
    load: state_pb2.WorkerLoad = field(default_factory=state_pb2.WorkerLoad)
    block_hashes: list[bytes] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)  # every request admitted
    num_open: int = 0  # calls being served
    num_cancelled: int = 0
    num_streams: int = 0  # state streams ever opened
    description: WorkerDescription | None = None

    def __post_init__(self) -> None:
        self.pool = self.worker_id.partition("-")[0]
        self.load.MergeFrom(
            state_pb2.WorkerLoad(
                state="ready",
                prefill_tokens_per_s=10_000.0,
                step_s=0.001,
                blocks=state_pb2.BlockCounts(free=self.num_kv_blocks, total=self.num_kv_blocks),
            )
        )
        self._server: WorkerServer | None = None
        self._changed: set[asyncio.Event] = set()
        self._events: dict[asyncio.Event, list[State]] = {}

    async def start(self) -> WorkerDescription:
        """Serve on a free loopback port."""
        self._server = WorkerServer(bind_host="127.0.0.1", config=RpcConfig(), token=TOKEN)
        address = await self._server.start(self.add_servicers)
        self.description = WorkerDescription(
            worker_id=self.worker_id,
            pool=self.pool,
            incarnation=self.incarnation,
            address=address,
            node_id="node",
            pid=os.getpid(),
        )
        return self.description

    def add_servicers(self, server: grpc.aio.Server) -> None:
        """Register the services."""
        state_pb2_grpc.add_WorkerServiceServicer_to_server(FakeState(self), server)

    async def stop(self) -> None:
        """Die: calls break, connections are refused."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)

    def touch(self) -> None:
        """Send the load now."""
        for event in self._changed:
            event.set()

    def publish(self, *, stored: Iterable[bytes] = (), removed: Iterable[bytes] = ()) -> None:
        """Send changes of the prefix cache."""
        body = State.BlockEvents(stored=stored, removed=removed)
        self.block_hashes = [h for h in self.block_hashes if h not in body.removed]
        self.block_hashes += body.stored
        for events in self._events.values():
            events.append(State(block_events=body))
        self.touch()

    def hello(self) -> State.Hello:
        """Who this is."""
        return State.Hello(
            worker=common_pb2.WorkerRef(worker_id=self.worker_id, incarnation=self.incarnation),
            layout=common_pb2.KVLayout(model_id="fake", dtype="float32", block_size=BLOCK_SIZE),
            pool=self.pool,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            num_kv_blocks=self.num_kv_blocks,
            hash_root=HASH_ROOT,
            max_num_batched_tokens=64,
            kv_bytes_per_token=1000,
        )

    async def watch(self) -> AsyncIterator[State]:
        """One state stream."""
        self.num_streams += 1
        wake = asyncio.Event()
        self._changed.add(wake)
        pending = self._events.setdefault(wake, [])
        numbers = itertools.count()
        chunk = State.SnapshotChunk(block_hashes=self.block_hashes, last=True)
        pending += [State(hello=self.hello()), State(snapshot_chunk=chunk)]
        try:
            while True:
                pending.append(State(load=self.load))
                for message in list(pending):
                    message.sequence = next(numbers)
                    await self.thaw()
                    if self.num_skipped and message.WhichOneof("message") == "load":
                        self.num_skipped -= 1
                        continue
                    yield message
                pending.clear()
                wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.tick_s):
                        await wake.wait()
        finally:
            self._changed.discard(wake)
            self._events.pop(wake, None)

    async def thaw(self) -> None:
        """Wait while frozen."""
        while self.is_frozen:
            await asyncio.sleep(0.02)

    @contextlib.asynccontextmanager
    async def serving(self, request: Any, incarnation: int) -> AsyncIterator[None]:
        """Admit one call, or refuse it, and keep the counts."""
        await self.thaw()
        if self.num_stale or incarnation != self.incarnation:
            self.num_stale = max(self.num_stale - 1, 0)
            raise StaleWorkerError("another process is meant")
        if self.num_refusals:
            self.num_refusals -= 1
            raise AdmissionRefusedError("full", retry_after_s=0.1)
        self.requests.append(request)
        self.num_open += 1
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            raise
        finally:
            self.num_open -= 1


class FakeState(state_pb2_grpc.WorkerServiceServicer):
    """WatchState."""

    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    def WatchState(self, request: Any, context: Any) -> AsyncIterator[State]:  # noqa: N802
        """Stream the fake's state."""
        return self._worker.watch()


class HandOvers:
    """Stands for the KV plane between the fakes of one test: transfer id -> prefill is done."""

    def __init__(self) -> None:
        self._done: dict[int, asyncio.Event] = {}

    def of(self, transfer_id: int) -> asyncio.Event:
        """Set when the prefill worker committed."""
        return self._done.setdefault(transfer_id, asyncio.Event())


@dataclass(eq=False)
class FakePrefillWorker(FakeWorker):
    """Gives the first token after `prefill_s`."""

    worker_id: str = "prefill-0"
    hand_overs: HandOvers = field(default_factory=HandOvers)
    prefill_s: float = 0.0
    num_cached_tokens: int = 0
    timings: common_pb2.WorkerTimings = field(default_factory=common_pb2.WorkerTimings)
    hide_token: bool = False  # compute and commit, but end without telling the router
    error: str = ""  # fail each request with this
    on_request: Callable[[], Awaitable[None]] | None = None  # runs before the token
    released: list[int] = field(default_factory=list)

    def add_servicers(self, server: grpc.aio.Server) -> None:
        super().add_servicers(server)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(FakePrefillService(self), server)


class FakePrefillService(prefill_pb2_grpc.PrefillServiceServicer):
    """Prefill and Release."""

    def __init__(self, worker: FakePrefillWorker) -> None:
        self._worker = worker

    async def Prefill(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """Compute."""
        worker, message = self._worker, prefill_pb2.PrefillResponse
        async with worker.serving(request, request.prefill_incarnation):
            num_tokens = len(request.request.token_ids)
            yield message(
                progress=message.Progress(
                    num_computed_tokens=num_tokens, num_cached_tokens=worker.num_cached_tokens
                )
            )
            await asyncio.sleep(worker.prefill_s)
            if worker.on_request is not None:
                await worker.on_request()
            if worker.error:
                raise RequestFailedError(worker.error)
            await worker.thaw()
            worker.hand_overs.of(request.transfer_id).set()
            if not worker.hide_token:
                yield message(tokens=tokens_at(request.request, num_tokens), timings=worker.timings)

    async def Release(  # noqa: N802
        self, request: prefill_pb2.ReleaseRequest, context: Any
    ) -> prefill_pb2.ReleaseResponse:
        """Remember what was released."""
        self._worker.released.append(request.transfer_id)
        return prefill_pb2.ReleaseResponse()


@dataclass(eq=False)
class FakeDecodeWorker(FakeWorker):
    """Gives a token each `step_s`, from its prompt or after a hand-over."""

    worker_id: str = "decode-0"
    hand_overs: HandOvers = field(default_factory=HandOvers)
    auto_link: bool = True  # a link to every peer is ready at once
    step_s: float = 0.0
    repeats_first: bool = True  # tells the first token again after a hand-over
    gap_at: int | None = None  # output offset to skip
    end_after: int | None = None  # output offset at which the stream just ends
    migrate_after: int | None = None
    num_cached_tokens: int = 0
    kv_transfer_bytes: int = 0
    timings: common_pb2.WorkerTimings = field(default_factory=common_pb2.WorkerTimings)
    on_token: Callable[[int], Awaitable[None]] | None = None  # runs before each output offset
    peers: list[common_pb2.Peer] = field(default_factory=list)
    num_set_peers: int = 0

    def add_servicers(self, server: grpc.aio.Server) -> None:
        super().add_servicers(server)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(FakeDecodeService(self), server)

    def link(self, peers: Iterable[common_pb2.Peer], state: str = "ready") -> None:
        """Say that these links are in this state."""
        del self.load.links[:]
        for peer in peers:
            self.load.links.add(
                peer_id=peer.worker.worker_id,
                peer_incarnation=peer.worker.incarnation,
                state=state,
                generation=1,
                backend="fake",
                bandwidth_bytes_per_s=1e9,
                latency_s=1e-4,
            )
        self.touch()


class FakeDecodeService(decode_pb2_grpc.DecodeServiceServicer):
    """SetPeers and Decode."""

    def __init__(self, worker: FakeDecodeWorker) -> None:
        self._worker = worker

    async def SetPeers(  # noqa: N802
        self, request: decode_pb2.SetPeersRequest, context: Any
    ) -> decode_pb2.SetPeersResponse:
        """Link to them all."""
        self._worker.peers = list(request.prefill_workers)
        self._worker.num_set_peers += 1
        if self._worker.auto_link:
            self._worker.link(self._worker.peers)
        return decode_pb2.SetPeersResponse()

    async def Decode(  # noqa: N802
        self, request: decode_pb2.DecodeRequest, context: Any
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        """Wait for the hand-over, then count through the output."""
        worker, message = self._worker, decode_pb2.DecodeResponse
        async with worker.serving(request, request.decode_incarnation):
            yield message(admitted=message.Admitted())
            is_first = True
            start = len(request.request.token_ids)
            if request.HasField("prefill_worker"):
                await worker.hand_overs.of(request.transfer_id).wait()
                start += not worker.repeats_first
            prompt_len = request.request.num_prompt_tokens
            for position in range(start, prompt_len + request.request.sampling_params.max_tokens):
                offset = position - prompt_len
                await asyncio.sleep(worker.step_s)
                if worker.on_token is not None:
                    await worker.on_token(offset)
                await worker.thaw()
                if offset == worker.end_after:
                    return
                if offset == worker.migrate_after:
                    migrate = common_pb2.FINISH_REASON_MIGRATE
                    yield message(tokens=common_pb2.Tokens(finish_reason=migrate))
                    return
                if offset == worker.gap_at:
                    continue
                response = message(tokens=tokens_at(request.request, position))
                if is_first or response.tokens.finish_reason:
                    response.timings.CopyFrom(worker.timings)
                    response.num_cached_tokens = worker.num_cached_tokens
                    response.kv_transfer_bytes = worker.kv_transfer_bytes
                is_first = False
                yield response


def tokens_at(request: common_pb2.EngineRequest, position: int) -> common_pb2.Tokens:
    """The token of one step, with the finish if it is the last."""
    prompt_len = request.num_prompt_tokens
    prompt = request.token_ids[:prompt_len]
    is_last = position + 1 == prompt_len + request.sampling_params.max_tokens
    return common_pb2.Tokens(
        start_position=position,
        token_ids=[token_at(prompt, position)],
        finish_reason=common_pb2.FINISH_REASON_LENGTH if is_last else 0,
    )
