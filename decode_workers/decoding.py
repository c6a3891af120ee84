"""Decodes requests, after a hand-over or from their prompt.

Life cycle of a request in a decode worker, with a prefill worker:

1. Admitted: a soft reservation, counted as waiting. Refused when too many wait, when the worker
   drains, or when the router meant another process.
2. Transferring: the prefill worker's Transfer stream is followed; its first offer takes the blocks,
   each range that is offered and not cached here is fetched.
3. Arrived: all KV is here and committed; the prefill worker is told to let go of its own.
4. Decoding: the first token of each choice came with the COMMIT, the engine goes on from them.
5. Finished: every choice has ended, the blocks are free or cached, the Decode stream ends.

Without a prefill worker 2 and 3 fall away and the engine computes the prompt first. A request that
is cancelled, fails or migrates gives up its blocks in any state; a transfer that failed is lost,
and the router tries again elsewhere.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from decode_workers.trace import DecodeTrace
from engine.engine_loop import EngineLoop
from engine.engine_thread import EngineFailedError, EngineStoppedError
from engine.output import make_output
from engine.request import FinishReason, Request, RequestOutput
from engine.request_stream import RequestStream
from faults.plan import fault_point_async
from kv_transfer.control import (
    CommitChoice,
    PeerInfo,
    TransferControl,
    TransferFailedError,
    WorkerRef,
)
from kv_transfer.link_dialer import LinkDialer
from kv_transfer.receiver import KVReceiver, Received, ReceiveOrder
from rpc.admission import Admission, Leg
from rpc.engine_request import error_of
from rpc.errors import TransferLostError, WorkerUnavailableError
from rpc.worker_metrics import WorkerMetrics
from telemetry import metrics, tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOrder:
    """One request to decode, and where its KV comes from."""

    request: Request
    transfer_id: int
    epoch: int
    prefill_worker: WorkerRef | None  # None: compute the prompt here
    decode_incarnation: int
    timeout_s: float  # left of the request's deadline


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request will be worked on."""


@dataclass(slots=True, kw_only=True)
class RunningRequest:
    """A request from its admission to the end of its stream."""

    request: Request
    leg: Leg
    trace: DecodeTrace
    cancelled_choices: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """The KV is here."""

    num_cached_tokens: int
    num_bytes: int
    transfer_s: float
    tail_s: float  # from the COMMIT to the last byte


class Decoding:
    """Runs requests through transfer and engine.

    Invariant: when a request's stream ends, the engine owns nothing of it any more.
    """

    def __init__(
        self,
        *,
        engine_loop: EngineLoop,
        dialer: LinkDialer,
        receiver: KVReceiver,
        admission: Admission,
        open_control: Callable[[PeerInfo], TransferControl],
        worker_metrics: WorkerMetrics,
    ) -> None:
        self._engine_loop = engine_loop
        self._dialer = dialer
        self._receiver = receiver
        self._admission = admission
        self._open_control = open_control
        self._metrics = worker_metrics
        self._attempts = itertools.count()
        self._running: dict[tuple[int, int], RunningRequest] = {}

    def cancel_choices(self, transfer_id: int, epoch: int, choices: Iterable[int]) -> None:
        """End some choices of a request, whatever it is at; unknown ones are over already."""
        running = self._running.get((transfer_id, epoch))
        if running is not None:
            for choice_index in choices:
                running.cancelled_choices.add(choice_index)
                self._engine_loop.abort_choice(running.request.request_id, choice_index)

    async def decode(
        self, order: DecodeOrder
    ) -> AsyncGenerator[Admitted | Arrived | RequestOutput]:
        """Stream what happens to one request, its tokens above all."""
        request = order.request
        trace = DecodeTrace(
            request,
            order.transfer_id,
            worker_id=self._metrics.worker_id,
            prefill_worker_id=order.prefill_worker.worker_id if order.prefill_worker else "",
        )
        # Another attempt of the same request may still be on its way out here.
        request.request_id = f"{request.request_id}/{next(self._attempts)}"
        await fault_point_async("admission", request_label=request.request_label)
        with self._admission.admit(request.request_id, incarnation=order.decode_incarnation) as leg:
            yield Admitted()
            running = RunningRequest(request=request, leg=leg, trace=trace)
            try:
                with self._listed(order, running):
                    async with aclosing(self._work(order, running)) as messages:
                        async for message in messages:
                            yield message
            except (EngineFailedError, EngineStoppedError) as error:
                raise WorkerUnavailableError(str(error)) from error
            finally:
                trace.end()
                # Whatever is left of it; nothing, as a rule.
                self._engine_loop.abort(request.request_id)

    @contextmanager
    def _listed(self, order: DecodeOrder, running: RunningRequest) -> Iterator[None]:
        key = (order.transfer_id, order.epoch)
        self._running[key] = running
        try:
            yield
        finally:
            if self._running.get(key) is running:
                del self._running[key]

    def _work(
        self, order: DecodeOrder, running: RunningRequest
    ) -> AsyncGenerator[Arrived | RequestOutput]:
        if order.prefill_worker is None:
            return self._decode_alone(running)
        return self._decode_handed_over(order, running)

    async def _decode_alone(
        self, running: RunningRequest
    ) -> AsyncGenerator[Arrived | RequestOutput]:
        stream = await self._engine_loop.submit(running.request)
        try:
            async for output in self._checked(stream, running):
                # The router counts tokens; progress without any is of no use to it.
                if output.token_ids or output.finish_reason or output.prompt_logprobs:
                    yield output
        finally:
            stream.close()

    async def _decode_handed_over(
        self, order: DecodeOrder, running: RunningRequest
    ) -> AsyncGenerator[Arrived | RequestOutput]:
        request, num_tokens = order.request, order.request.num_tokens
        received = await self._receive(order, running)
        if received is None:
            yield make_output(request, finish_reason=FinishReason.MIGRATE)
            return
        running.trace.received(received)
        if received.num_bytes:
            self._metrics.observe(metrics.KV_TRANSFER_SECONDS, received.transfer_s)
        yield Arrived(
            num_cached_tokens=received.num_cached_tokens,
            num_bytes=received.num_bytes,
            transfer_s=received.transfer_s,
            tail_s=received.tail_s,
        )
        choices = received.commit.choices
        if sorted(choice.index for choice in choices) != list(request.choices):
            raise TransferLostError("the commit does not name the choices that were asked for")
        for choice in choices:
            if choice.finish_reason:
                yield _first_output(request, num_tokens, choice)
        wanted = [
            choice
            for choice in choices
            if not choice.finish_reason and choice.index not in running.cancelled_choices
        ]
        if wanted:
            async with aclosing(self._go_on(running, num_tokens, wanted)) as outputs:
                async for output in outputs:
                    yield output

    async def _go_on(
        self, running: RunningRequest, num_tokens: int, choices: list[CommitChoice]
    ) -> AsyncGenerator[RequestOutput]:
        """Decode from the peer's first tokens."""
        request = running.request
        first_tokens = {choice.index: choice.token_id for choice in choices}
        stream = self._engine_loop.open_stream(request.request_id, first_tokens)
        try:
            await self._engine_loop.call(
                lambda engine: engine.activate(request.request_id, first_tokens)
            )
            # The engine says nothing about a token it did not sample, unless that ends the choice.
            for choice in choices:
                yield _first_output(request, num_tokens, choice)
            async for output in self._checked(stream, running):
                yield output
        finally:
            stream.close()

    async def _receive(self, order: DecodeOrder, running: RunningRequest) -> Received | None:
        """Take the KV over; None when the worker drains and the request shall migrate."""
        leg, peer = running.leg, order.prefill_worker
        assert peer is not None
        link = self._dialer.link_for(peer.worker_id, peer.incarnation)
        if link is None:
            raise TransferLostError(f"there is no link to {peer.worker_id}")
        control = self._open_control(link.peer)
        receive_order = ReceiveOrder(
            transfer_id=order.transfer_id,
            epoch=order.epoch,
            link=link,
            num_tokens=order.request.num_tokens,
            request_label=order.request.request_label,
            timeout_s=order.timeout_s,
        )
        # The peer sees this span as the caller of its side, and links its own to it.
        with tracing.attached(running.trace.receive()):
            receiving = asyncio.ensure_future(
                self._receiver.receive(
                    receive_order,
                    control,
                    partial(self._engine_loop.reserve, order.request),
                    partial(self._give_back, order.request.request_id),
                )
            )
        leg.when_migrating(receiving.cancel)
        try:
            return await receiving
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if leg.is_migrating and task is not None and not task.cancelling():
                return None
            raise
        except TransferFailedError as error:
            running.trace.lost(error.reason)
            raise TransferLostError(str(error)) from error

    def _give_back(self, request_id: str, in_flight: Sequence[int]) -> None:
        self._engine_loop.abort(request_id, in_flight=in_flight)

    async def _checked(
        self, stream: RequestStream, running: RunningRequest
    ) -> AsyncGenerator[RequestOutput]:
        """Read the engine's outputs; a failure becomes an error, a drain a MIGRATE."""
        leg, cancelled = running.leg, running.cancelled_choices
        leg.when_migrating(partial(self._engine_loop.abort, stream.request_id))
        async for output in stream:
            leg.is_waiting = False
            if output.finish_reason is FinishReason.ABORT and output.choice_index in cancelled:
                continue
            if output.finish_reason is FinishReason.ABORT and leg.is_migrating:
                yield replace(output, finish_reason=FinishReason.MIGRATE)
                return
            self._raise_on_failure(output)
            running.trace.output(output)
            yield output

    def _raise_on_failure(self, output: RequestOutput) -> None:
        is_ours = self._engine_loop.failure is None
        if output.finish_reason is FinishReason.ERROR and is_ours:
            raise error_of(output)
        if output.finish_reason in {FinishReason.ERROR, FinishReason.ABORT}:
            # The engine ends, and with it all that it runs: others can go on with this request.
            raise WorkerUnavailableError(output.error or "the worker stops")


def _first_output(request: Request, position: int, choice: CommitChoice) -> RequestOutput:
    """What the engine did not say: the peer's first token of a choice."""
    return RequestOutput(
        request_id=request.request_id,
        choice_index=choice.index,
        start_position=position,
        token_ids=(choice.token_id,),
        logprobs=() if choice.logprobs is None else (choice.logprobs,),
        num_computed_tokens=position,
        num_cached_tokens=request.num_cached_tokens,
        finish_reason=FinishReason(choice.finish_reason) if choice.finish_reason else None,
    )
