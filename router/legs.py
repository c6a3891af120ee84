"""The calls of one attempt, as they go over the wire."""

import asyncio
import logging
from dataclasses import dataclass
from typing import TypeAlias

import grpc
from relevo.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

from router.worker_state import WorkerState
from rpc.channel import ChannelPool

RELEASE_TIMEOUT_S = 2.0
RELEASE_PAUSES_S = (0.2, 0.5, 1.0)  # between tries; together they outlast a default lease

# Generic in the stubs only, so these must stay text at run time.
PrefillCall: TypeAlias = (
    "grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]"
)
DecodeCall: TypeAlias = (
    "grpc.aio.UnaryStreamCall[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse]"
)

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlan:
    """Who does what."""

    request: common_pb2.EngineRequest
    prefill: WorkerState | None  # None: the decode worker prefills
    decode: WorkerState
    transfer_id: int  # random, this attempt's own
    epoch: int
    timeout_s: float

    @property
    def workers(self) -> tuple[WorkerState, ...]:
        """Those that take part."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


def open_prefill(plan: AttemptPlan, channels: ChannelPool) -> PrefillCall:
    """Ask the prefill worker to compute the prompt and its first token."""
    assert plan.prefill is not None
    request = prefill_pb2.PrefillRequest(
        request=plan.request,
        transfer_id=plan.transfer_id,
        epoch=plan.epoch,
        decode_worker=plan.decode.description.to_ref(),
        prefill_incarnation=plan.prefill.key.incarnation,
    )
    call: PrefillCall = _prefill_stub(plan.prefill, channels).Prefill(
        request, timeout=plan.timeout_s
    )
    return call


def open_decode(plan: AttemptPlan, channels: ChannelPool) -> DecodeCall:
    """Ask the decode worker to go on from there, or to do it all."""
    request = decode_pb2.DecodeRequest(
        request=plan.request,
        transfer_id=plan.transfer_id,
        epoch=plan.epoch,
        decode_incarnation=plan.decode.key.incarnation,
    )
    if plan.prefill is not None:
        request.prefill_worker.CopyFrom(plan.prefill.description.to_ref())
    call: DecodeCall = _decode_stub(plan, channels).Decode(request, timeout=plan.timeout_s)
    return call


async def cancel_choice(plan: AttemptPlan, choice_index: int, channels: ChannelPool) -> None:
    """Tell the decode worker that nobody wants this choice any more; best effort."""
    request = decode_pb2.CancelChoicesRequest(
        transfer_id=plan.transfer_id, epoch=plan.epoch, choice_indexes=[choice_index]
    )
    try:
        await _decode_stub(plan, channels).CancelChoices(request, timeout=RELEASE_TIMEOUT_S)
    except grpc.RpcError as error:
        _LOGGER.debug("Cancel on %s failed: %r", plan.decode.key.worker_id, error)


async def release_prefill(plan: AttemptPlan, channels: ChannelPool) -> None:
    """Tell the prefill worker that nobody will fetch the KV; best effort.

    A worker that is too busy to answer is asked again: until its lease runs out, nobody else can
    have the blocks.
    """
    assert plan.prefill is not None
    request = prefill_pb2.ReleaseRequest(transfer_id=plan.transfer_id, epoch=plan.epoch)
    for pause_s in (*RELEASE_PAUSES_S, None):
        try:
            await _prefill_stub(plan.prefill, channels).Release(request, timeout=RELEASE_TIMEOUT_S)
        except grpc.RpcError as error:
            _LOGGER.debug("Release on %s failed: %r", plan.prefill.key.worker_id, error)
        else:
            return
        if pause_s is not None:
            await asyncio.sleep(pause_s)


def _decode_stub(plan: AttemptPlan, channels: ChannelPool) -> decode_pb2_grpc.DecodeServiceStub:
    channel = channels.get(plan.decode.description.address)
    return decode_pb2_grpc.DecodeServiceStub(channel)  # type: ignore[no-untyped-call]


def _prefill_stub(
    worker: WorkerState, channels: ChannelPool
) -> prefill_pb2_grpc.PrefillServiceStub:
    channel = channels.get(worker.description.address)
    return prefill_pb2_grpc.PrefillServiceStub(channel)  # type: ignore[no-untyped-call]
