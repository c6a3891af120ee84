"""Fake workers for tests of the router and the faces: real gRPC servers, scripted behaviour.

Tokens are a function of the client's prompt and the position, so that every worker, and every
replay, agrees about them. Attributes may be changed while a worker serves.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
from relevo.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

from rpc.errors import RequestFailedError
from tests.fake_worker_base import (
    TOKEN,
    FakeWorker,
    choices_of,
    expected_tokens,
    token_at,
    tokens_at,
)

__all__ = [
    "TOKEN",
    "FakeDecodeWorker",
    "FakePrefillWorker",
    "HandOvers",
    "expected_tokens",
    "token_at",
]


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
    freezes_with_kv: bool = False  # it tells the first token and hands nothing over
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
        async with worker.serving(request, request.prefill_incarnation, context):
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
            if not worker.freezes_with_kv:
                worker.hand_overs.of(request.transfer_id).set()
            if worker.hide_token:
                return
            for index in choices_of(request.request):
                tokens = tokens_at(request.request, num_tokens, index)
                yield message(tokens=tokens, timings=worker.timings)
            worker.is_frozen = worker.freezes_with_kv
            await worker.thaw()

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
    cancelled: list[tuple[int, int]] = field(default_factory=list)  # transfer id, choice index

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
                latency_s=5e-3,
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

    async def CancelChoices(  # noqa: N802
        self, request: decode_pb2.CancelChoicesRequest, context: Any
    ) -> decode_pb2.CancelChoicesResponse:
        """Remember what was cancelled."""
        self._worker.cancelled += [(request.transfer_id, i) for i in request.choice_indexes]
        return decode_pb2.CancelChoicesResponse()

    async def Decode(  # noqa: N802
        self, request: decode_pb2.DecodeRequest, context: Any
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        """Wait for the hand-over, then count through the output."""
        worker, message = self._worker, decode_pb2.DecodeResponse
        async with worker.serving(request, request.decode_incarnation, context):
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
                for index in choices_of(request.request):
                    if (request.transfer_id, index) in worker.cancelled:
                        continue
                    response = message(tokens=tokens_at(request.request, position, index))
                    if is_first or response.tokens.finish_reason:
                        response.timings.CopyFrom(worker.timings)
                        response.num_cached_tokens = worker.num_cached_tokens
                        response.kv_transfer_bytes = worker.kv_transfer_bytes
                    is_first = False
                    yield response
