"""Plays the router towards worker processes: follows states, opens Prefill and Decode streams."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

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

from rpc.channel import ChannelPool
from rpc.config import RpcConfig
from rpc.description import WorkerDescription
from rpc.token import read_token
from tests.patience import NAP_S, comes_true, naps

SET_PEERS_PERIOD_S = 0.2


@dataclass(slots=True)
class WatchedWorker:
    """What the state stream of one worker said so far."""

    description: WorkerDescription
    hello: state_pb2.WatchStateResponse.Hello | None = None
    load: state_pb2.WorkerLoad | None = None
    block_hashes: set[bytes] = field(default_factory=set)
    metrics: dict[tuple[str, str], float] = field(default_factory=dict)
    is_lost: bool = False

    def take(self, response: state_pb2.WatchStateResponse) -> None:
        match response.WhichOneof("message"):
            case "hello":
                self.hello = response.hello
            case "snapshot_chunk":
                self.block_hashes.update(response.snapshot_chunk.block_hashes)
            case "block_events":
                events = response.block_events
                if events.cleared:
                    self.block_hashes.clear()
                self.block_hashes.difference_update(events.removed)
                self.block_hashes.update(events.stored)
            case "load":
                self.load = response.load
                for each in response.load.metrics:
                    label = each.labels.get("reason", each.labels.get("state", ""))
                    self.metrics[each.name, label] = each.value

    def link_state(self, peer_id: str) -> str:
        links = self.load.links if self.load is not None else ()
        return next((link.state for link in links if link.peer_id == peer_id), "none")


@dataclass(slots=True)
class PrefillResult:
    """One whole Prefill stream."""

    progress: list[prefill_pb2.PrefillResponse.Progress] = field(default_factory=list)
    tokens: common_pb2.Tokens | None = None
    timings: common_pb2.WorkerTimings | None = None


@dataclass(slots=True)
class DecodeResult:
    """One whole Decode stream; positions are checked on the way."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: int = 0
    start_position: int = -1
    num_cached_tokens: int = 0
    kv_transfer_bytes: int = 0
    timings: common_pb2.WorkerTimings | None = None
    is_admitted: bool = False

    def take(self, response: decode_pb2.DecodeResponse) -> None:
        if response.HasField("admitted"):
            self.is_admitted = True
            return
        tokens = response.tokens
        if self.start_position < 0:
            self.start_position = tokens.start_position
        assert tokens.start_position == self.start_position + len(self.token_ids), "a gap"
        self.token_ids += tokens.token_ids
        self.finish_reason = tokens.finish_reason
        self.num_cached_tokens = max(self.num_cached_tokens, response.num_cached_tokens)
        self.kv_transfer_bytes = max(self.kv_transfer_bytes, response.kv_transfer_bytes)
        if response.HasField("timings"):
            self.timings = response.timings


class WorkerClient:
    """Channels, state streams and peers of one test."""

    def __init__(self, token_file: Path) -> None:
        self._channels = ChannelPool(token=read_token(token_file), config=RpcConfig())
        self._tasks: list[asyncio.Task[None]] = []
        self._transfer_ids = itertools.count(time.time_ns() // 1000)
        self.workers: dict[str, WatchedWorker] = {}
        # where decode workers shall reach the prefill worker of an address
        self.detour: Callable[[str], str] = lambda address: address

    def next_transfer_id(self) -> int:
        return next(self._transfer_ids)

    def watch(self, description: WorkerDescription) -> WatchedWorker:
        """Follow a worker's state; a worker that was restarted replaces the one before."""
        worker = WatchedWorker(description)
        self.workers[description.worker_id] = worker
        self._tasks.append(asyncio.create_task(self._watch(worker)))
        if description.pool == "decode":
            self._tasks.append(asyncio.create_task(self._keep_setting_peers(worker)))
        return worker

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channels.close()

    def prefill_stub(self, worker_id: str = "prefill-0") -> prefill_pb2_grpc.PrefillServiceStub:
        channel = self._channels.get(self.workers[worker_id].description.address)
        return prefill_pb2_grpc.PrefillServiceStub(channel)

    def decode_stub(self, worker_id: str = "decode-0") -> decode_pb2_grpc.DecodeServiceStub:
        channel = self._channels.get(self.workers[worker_id].description.address)
        return decode_pb2_grpc.DecodeServiceStub(channel)

    def open_prefill(
        self,
        request: common_pb2.EngineRequest,
        *,
        transfer_id: int,
        prefill: str = "prefill-0",
        decode: str = "decode-0",
        timeout_s: float = 30.0,
    ):
        """Start a Prefill call."""
        return self.prefill_stub(prefill).Prefill(
            prefill_pb2.PrefillRequest(
                request=request,
                transfer_id=transfer_id,
                epoch=1,
                decode_worker=self.workers[decode].description.to_ref(),
                prefill_incarnation=self.workers[prefill].description.incarnation,
            ),
            timeout=timeout_s,
        )

    def open_decode(
        self,
        request: common_pb2.EngineRequest,
        *,
        transfer_id: int = 0,
        prefill: str | None = "prefill-0",
        decode: str = "decode-0",
        timeout_s: float = 30.0,
    ):
        """Start a Decode call."""
        message = decode_pb2.DecodeRequest(
            request=request,
            transfer_id=transfer_id,
            epoch=1,
            decode_incarnation=self.workers[decode].description.incarnation,
        )
        if prefill is not None:
            message.prefill_worker.CopyFrom(self.workers[prefill].description.to_ref())
        return self.decode_stub(decode).Decode(message, timeout=timeout_s)

    async def release(self, transfer_id: int, *, prefill: str = "prefill-0") -> None:
        """Tell a prefill worker that nobody will fetch this transfer."""
        request = prefill_pb2.ReleaseRequest(transfer_id=transfer_id, epoch=1)
        with suppress(grpc.aio.AioRpcError):
            await self.prefill_stub(prefill).Release(request, timeout=5.0)

    async def run_pair(
        self,
        request: common_pb2.EngineRequest,
        *,
        prefill: str = "prefill-0",
        decode: str = "decode-0",
        timeout_s: float = 30.0,
    ) -> tuple[PrefillResult, DecodeResult]:
        """Run one request over a pair as the router does: both streams at once."""
        transfer_id = self.next_transfer_id()
        pair = {"transfer_id": transfer_id, "prefill": prefill, "decode": decode}
        prefilling = self.open_prefill(request, **pair, timeout_s=timeout_s)
        decoding = self.open_decode(request, **pair, timeout_s=timeout_s)
        return await asyncio.gather(read_prefill(prefilling), read_decode(decoding))

    async def eventually(
        self, condition: Callable[[], bool], *, timeout_s: float = 20.0, what: str = ""
    ) -> None:
        """Wait until the watched states fulfil a condition."""
        if not await comes_true(condition, timeout_s):
            raise AssertionError(f"{what or condition} not within {timeout_s} s: {self.describe()}")

    async def until_linked(
        self, decode: str = "decode-0", prefill: str = "prefill-0", *, timeout_s: float = 30.0
    ) -> None:
        await self.eventually(
            lambda: self.workers[decode].link_state(prefill) == "ready",
            timeout_s=timeout_s,
            what=f"a link between {decode} and {prefill}",
        )

    async def until_quiet(self, *worker_ids: str, timeout_s: float = 2.0) -> None:
        """Wait until nothing runs and no block is used or held, and check every pool's sum."""
        names = worker_ids or tuple(self.workers)

        def is_quiet() -> bool:
            return all(_is_quiet(self.workers[name].load) for name in names)

        for _ in naps(timeout_s):
            # Only what is said from now on counts.
            await self.refresh(*names)
            if is_quiet():
                return
            await asyncio.sleep(NAP_S)
        raise AssertionError(f"not quiet in {timeout_s} s: {self.describe()}")

    async def until_counted(
        self,
        worker_id: str,
        name: str,
        label: str = "",
        *,
        is_right: Callable[[float], bool] = lambda value: value > 0,
    ) -> None:
        """Wait until a metric of a worker has been counted."""
        for _ in naps(10.0):
            await self.refresh(worker_id)
            if is_right(self.workers[worker_id].metrics.get((name, label), 0.0)):
                return
            await asyncio.sleep(NAP_S)
        raise AssertionError(f"{name} {label} of {worker_id} is not counted")

    async def refresh(self, *worker_ids: str) -> None:
        """Hear now what an idle worker says once a second: a new stream begins with all of it."""
        await asyncio.gather(*(self._refresh(self.workers[name]) for name in worker_ids))

    async def _refresh(self, worker: WatchedWorker) -> None:
        call = self._watch_state(worker)
        hashes: set[bytes] = set()
        try:
            async for response in call:
                hashes.update(response.snapshot_chunk.block_hashes)
                if response.HasField("load"):
                    worker.block_hashes = hashes
                    worker.take(response)
                    return
        finally:
            call.cancel()

    def describe(self) -> str:
        return "; ".join(
            f"{name}: {' '.join(str(worker.load).split())}" for name, worker in self.workers.items()
        )

    def _to_peer(self, description: WorkerDescription) -> common_pb2.Peer:
        peer = description.to_peer()
        peer.address = self.detour(peer.address)
        return peer

    async def _watch(self, worker: WatchedWorker) -> None:
        try:
            async for response in self._watch_state(worker):
                worker.take(response)
        except grpc.aio.AioRpcError:
            worker.is_lost = True

    def _watch_state(self, worker: WatchedWorker):
        stub = state_pb2_grpc.WorkerServiceStub(self._channels.get(worker.description.address))
        return stub.WatchState(state_pb2.WatchStateRequest(ingress_id="test"))

    async def _keep_setting_peers(self, worker: WatchedWorker) -> None:
        while self.workers[worker.description.worker_id] is worker:
            peers = [
                self._to_peer(each.description)
                for each in self.workers.values()
                if each.description.pool == "prefill" and not each.is_lost
            ]
            with suppress(grpc.aio.AioRpcError):
                await self.decode_stub(worker.description.worker_id).SetPeers(
                    decode_pb2.SetPeersRequest(ingress_id="test", prefill_workers=peers),
                    timeout=1.0,
                )
            await asyncio.sleep(SET_PEERS_PERIOD_S)


def _is_quiet(load: state_pb2.WorkerLoad) -> bool:
    blocks = load.blocks
    states = (blocks.free, blocks.cached, blocks.used, blocks.held, blocks.quarantined)
    assert sum(states) == blocks.total, f"the block sum is broken: {blocks}"
    return not (
        load.num_running
        or load.num_waiting
        or load.num_transferring
        or blocks.used
        or blocks.held
        or blocks.quarantined
    )


def make_request(
    token_ids: Sequence[int],
    *,
    request_id: str,
    max_tokens: int = 8,
    ignore_eos: bool = True,
    cache_salt: str = "",
    temperature: float = 0.0,
    seed: int = 0,
    request_label: str = "",
    priority: int = 0,
) -> common_pb2.EngineRequest:
    """An engine request for a prompt."""
    return common_pb2.EngineRequest(
        request_id=request_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling_params=common_pb2.SamplingParams(
            temperature=temperature,
            top_p=1.0,
            seed=seed,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
        ),
        cache_salt=cache_salt,
        request_label=request_label,
        priority=priority,
    )


async def read_prefill(call) -> PrefillResult:
    """Read a Prefill stream to its end."""
    result = PrefillResult()
    while (response := await call.read()) is not grpc.aio.EOF:
        if response.HasField("progress"):
            result.progress.append(response.progress)
        else:
            result.tokens, result.timings = response.tokens, response.timings
    return result


async def read_decode(call) -> DecodeResult:
    """Read a Decode stream to its end."""
    result = DecodeResult()
    while (response := await call.read()) is not grpc.aio.EOF:
        result.take(response)
    return result


@asynccontextmanager
async def worker_client(
    token_file: Path, descriptions: Sequence[WorkerDescription]
) -> AsyncIterator[WorkerClient]:
    """A client that watches these workers."""
    client = WorkerClient(token_file)
    try:
        for description in descriptions:
            client.watch(description)
        yield client
    finally:
        await client.close()
