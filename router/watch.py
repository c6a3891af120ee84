"""Holds the state stream of one worker process for as long as that process may be alive."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import grpc
from relevo.v1 import state_pb2, state_pb2_grpc

from router.worker_state import Change, ResyncNeededError, WorkerState, WrongWorkerError
from rpc.channel import ChannelPool
from telemetry import provider

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
SILENT_STREAM_S = 5.0  # a worker speaks each second; a stream quiet for this long is opened anew

_LOGGER = logging.getLogger(__name__)


class OnWorkerChange(Protocol):
    """Told after something changed that routing cares about."""

    def __call__(self, worker: WorkerState, *, is_membership: bool) -> None:
        """`is_membership`: it came, or it was lost."""
        ...


async def watch_worker(
    worker: WorkerState,
    channels: ChannelPool,
    *,
    ingress_id: str,
    on_change: OnWorkerChange,
    now: Callable[[], float],
) -> None:
    """Reopen the stream until discovery no longer knows the worker, or another took its place."""
    request = state_pb2.WatchStateRequest(ingress_id=ingress_id)
    pause_s = FIRST_PAUSE_S
    while True:
        stub = state_pb2_grpc.WorkerServiceStub(  # type: ignore[no-untyped-call]
            channels.get(worker.description.address)
        )
        call = stub.WatchState(request)
        worker.start_stream()
        try:
            if await _read(call, worker, on_change=on_change, now=now):
                pause_s = FIRST_PAUSE_S
        except WrongWorkerError as error:
            _LOGGER.info("Worker %s is gone: %s", worker.key.worker_id, error)
            return
        finally:
            call.cancel()
            was_connected = worker.is_connected
            worker.disconnect(now_s=now())
            if was_connected:
                on_change(worker, is_membership=True)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        if not worker.is_described:
            return


async def _read(
    call: "grpc.aio.UnaryStreamCall[state_pb2.WatchStateRequest, state_pb2.WatchStateResponse]",
    worker: WorkerState,
    *,
    on_change: OnWorkerChange,
    now: Callable[[], float],
) -> bool:
    """Apply messages until the stream ends; True if at least the Hello came."""
    heard = False
    try:
        while True:
            async with asyncio.timeout(SILENT_STREAM_S):
                message = await call.read()
            if not isinstance(message, state_pb2.WatchStateResponse):
                return heard  # the end of the stream
            change = worker.apply(message, now_s=now())
            if message.spans:
                provider.receive(message.spans)
            if not heard or change is Change.ROUTING:
                on_change(worker, is_membership=not heard)
            heard = True
            # The life check gave this stream up; the next Hello makes it good again.
            if not worker.is_connected:
                return heard
    except (grpc.RpcError, ResyncNeededError, TimeoutError) as error:
        _LOGGER.info("State stream of %s ended: %r", worker.key.worker_id, error)
        return heard
