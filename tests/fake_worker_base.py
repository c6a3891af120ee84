"""What both kinds of fake workers share: identity, server, state stream, admission."""

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from relevo.v1 import (
    common_pb2,
    state_pb2,
    state_pb2_grpc,
)

from rpc.config import RpcConfig
from rpc.description import WorkerDescription
from rpc.errors import AdmissionRefusedError, StaleWorkerError
from rpc.server import WorkerServer

TOKEN = "token-of-the-fake-cluster"
HASH_ROOT = b"root" * 8
BLOCK_SIZE = 4
_incarnations = itertools.count(1000)

State = state_pb2.WatchStateResponse


def token_at(prompt: Sequence[int], position: int, choice_index: int = 0) -> int:
    """The token every fake worker gives at an absolute position of a choice."""
    return 100 + (sum(prompt) * 31 + position * 7 + choice_index * 131) % 800


def expected_tokens(prompt: Sequence[int], num_tokens: int, *, choice_index: int = 0) -> list[int]:
    """The whole output of a choice."""
    return [token_at(prompt, len(prompt) + offset, choice_index) for offset in range(num_tokens)]


def choices_of(request: common_pb2.EngineRequest) -> range:
    """Indexes of a request's choices."""
    return range(request.choice_index, request.choice_index + max(request.num_choices, 1))


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
    max_open: int | None = None  # calls it admits at a time; it refuses more
    num_refused: int = 0
    num_stale: int = 0  # requests to refuse as meant for another process
    num_skipped: int = 0  # state messages to lose: a gap
    is_frozen: bool = False  # says nothing more on any stream
    is_mute: bool = False  # says nothing more on its state streams
    load: state_pb2.WorkerLoad = field(default_factory=state_pb2.WorkerLoad)
    block_hashes: list[bytes] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)  # every request admitted
    times_left_s: list[float] = field(default_factory=list)  # of each, when it arrived
    open_requests: list[Any] = field(default_factory=list)  # being served
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

    @property
    def num_open(self) -> int:
        """Calls being served."""
        return len(self.open_requests)

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
                while pending:  # more may come while one is on its way
                    message = pending.pop(0)
                    message.sequence = next(numbers)
                    while self.is_mute:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                    await self.thaw()
                    if self.num_skipped and message.WhichOneof("message") == "load":
                        self.num_skipped -= 1
                        continue
                    yield message
                wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.tick_s):
                        await wake.wait()
        finally:
            self._changed.discard(wake)
            self._events.pop(wake, None)

    async def thaw(self) -> None:
        """Wait while frozen."""
        while self.is_frozen:  # noqa: ASYNC110 - a flag is simplest to set from tests
            await asyncio.sleep(0.02)

    @contextlib.asynccontextmanager
    async def serving(self, request: Any, incarnation: int, context: Any) -> AsyncIterator[None]:
        """Admit one call, or refuse it, and keep the counts."""
        left_s = context.time_remaining()
        await self.thaw()
        if self.num_stale or incarnation != self.incarnation:
            self.num_stale = max(self.num_stale - 1, 0)
            raise StaleWorkerError("another process is meant")
        is_full = self.max_open is not None and self.num_open >= self.max_open
        if self.num_refusals or is_full:
            self.num_refusals = max(self.num_refusals - 1, 0)
            self.num_refused += 1
            raise AdmissionRefusedError("full", retry_after_s=0.1)
        self.requests.append(request)
        self.times_left_s.append(left_s)
        self.open_requests.append(request)
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            raise
        finally:
            self.open_requests.remove(request)


class FakeState(state_pb2_grpc.WorkerServiceServicer):
    """WatchState."""

    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    def WatchState(self, request: Any, context: Any) -> AsyncIterator[State]:  # noqa: N802
        """Stream the fake's state."""
        return self._worker.watch()


def tokens_at(
    request: common_pb2.EngineRequest, position: int, choice_index: int
) -> common_pb2.Tokens:
    """The token of one step of a choice, with the finish if it is the last."""
    prompt_len = request.num_prompt_tokens
    prompt = request.token_ids[:prompt_len]
    is_last = position + 1 == prompt_len + request.sampling_params.max_tokens
    return common_pb2.Tokens(
        start_position=position,
        token_ids=[token_at(prompt, position, choice_index)],
        choice_index=choice_index,
        finish_reason=common_pb2.FINISH_REASON_LENGTH if is_last else 0,
    )
