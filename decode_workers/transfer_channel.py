"""A decode worker's calls to one prefill worker about KV: follow, fetch, release."""

from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType

import grpc
from relevo.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc

from faults.plan import fault_point_async
from kv_transfer.control import (
    ChunkDigest,
    Commit,
    CommitChoice,
    ControlClosedError,
    FetchOrder,
    FetchReply,
    FetchVerdict,
    Offer,
    TransferMessage,
    TransferNotFoundError,
    WorkerRef,
)
from rpc.engine_request import finish_reason_from_proto
from rpc.logprobs import first_logprobs
from rpc.mirror import from_message, to_message

_VERDICTS = {
    prefill_pb2.FETCH_VERDICT_GRANTED: FetchVerdict.GRANTED,
    prefill_pb2.FETCH_VERDICT_NOT_YET: FetchVerdict.NOT_YET,
    prefill_pb2.FETCH_VERDICT_GONE: FetchVerdict.GONE,
}
# How often a message is sent or taken after what a fault plan says of it.
_TIMES: Mapping[str | None, int] = MappingProxyType({"drop": 0, "duplicate": 2})


class TransferChannel:
    """A `TransferControl` over gRPC. Every call is idempotent on the other side."""

    def __init__(
        self, channel: grpc.aio.Channel, *, ends: frozenset[str], timeout_s: float
    ) -> None:
        self._stub = prefill_pb2_grpc.PrefillServiceStub(channel)  # type: ignore[no-untyped-call]
        self._ends = ends  # ids of both workers: a message between them is a message of each
        self._timeout_s = timeout_s

    async def watch(
        self, transfer_id: int, *, epoch: int, decode_worker: WorkerRef
    ) -> AsyncIterator[TransferMessage]:
        """Follow one transfer up to its COMMIT; closing the iterator ends the stream."""
        call = self._stub.Transfer(
            prefill_pb2.TransferRequest(
                transfer_id=transfer_id,
                epoch=epoch,
                decode_worker=to_message(common_pb2.WorkerRef, decode_worker),
            )
        )
        try:
            async for response in call:
                verdict = await self._ask_fault_plan()
                for _ in range(_TIMES.get(verdict, 1)):
                    yield _message_of(response)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise TransferNotFoundError(error.details()) from error
            raise ControlClosedError(f"Transfer ended: {error.details()}") from error
        finally:
            call.cancel()

    async def fetch(self, order: FetchOrder) -> FetchReply:
        """Ask for one range; the outcome of a call that raises is unknown."""
        request = prefill_pb2.FetchRequest(
            transfer_id=order.transfer_id,
            epoch=order.epoch,
            decode_worker=to_message(common_pb2.WorkerRef, order.decode_worker),
            generation=order.generation,
            ticket=order.ticket,
            token_start=order.token_start,
            token_end=order.token_end,
            with_digest=order.with_digest,
        )
        fault = await self._ask_fault_plan()
        if fault == "drop":
            raise ControlClosedError("the fetch was dropped")
        try:
            if fault == "duplicate":
                await self._stub.Fetch(request, timeout=self._timeout_s)
            response = await self._stub.Fetch(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise ControlClosedError(f"Fetch failed: {error.details()}") from error
        verdict = _VERDICTS.get(response.verdict, FetchVerdict.GONE)
        return FetchReply(verdict, response.digest, tuple(response.lent_block_ids))

    async def release(self, transfer_id: int, *, epoch: int) -> None:
        """Give the KV back; ControlClosedError when this could not be said."""
        request = prefill_pb2.ReleaseRequest(transfer_id=transfer_id, epoch=epoch)
        verdict = await self._ask_fault_plan()
        if verdict == "drop":
            raise ControlClosedError("the release was dropped")
        for _ in range(_TIMES.get(verdict, 1)):
            try:
                await self._stub.Release(request, timeout=self._timeout_s)
            except grpc.aio.AioRpcError as error:
                raise ControlClosedError(f"Release failed: {error.details()}") from error

    async def _ask_fault_plan(self) -> str | None:
        return await fault_point_async("control_message", worker=self._ends)


def _message_of(response: prefill_pb2.TransferResponse) -> TransferMessage:
    match response.WhichOneof("message"):
        case "offer":
            return Offer(response.offer.num_tokens)
        case "commit":
            return _commit_of(response.commit)
        case _:
            raise ControlClosedError("the prefill worker sent an empty message")


def _commit_of(commit: prefill_pb2.TransferResponse.Commit) -> Commit:
    return Commit(
        num_tokens=commit.num_tokens,
        choices=tuple(
            CommitChoice(
                index=choice.index,
                token_id=choice.token_id,
                finish_reason=finish_reason_from_proto(choice.finish_reason) or "",
                logprobs=first_logprobs(choice.logprobs),
            )
            for choice in commit.choices
        ),
        digests=tuple(from_message(ChunkDigest, digest) for digest in commit.digests),
    )
