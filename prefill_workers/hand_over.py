"""Computes prompts and hands their KV over.

Life cycle of a request in a prefill worker:

1. Admitted: counted as waiting. Refused when too many wait, when the worker drains, or when the
   router meant another process.
2. Announced: the sender knows the transfer, so that the decode worker may follow it already.
3. Computing: a cached prefix is offered as the first step begins, and with it that it has begun;
   then each step's finished tokens.
4. Committed: the prompt is computed and the first token of each choice sampled; the Prefill stream
   ends.
5. Held: the blocks stay until the decode worker releases them or the lease runs out.

A request that is cancelled, fails or migrates leaves 2 and 3 through the sender, which lets go of
the blocks as soon as no granted operation reads them.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from engine.engine_loop import EngineLoop
from engine.engine_thread import EngineFailedError, EngineStoppedError
from engine.request import FinishReason, Request, RequestOutput
from faults.plan import fault_point_async
from kv_transfer.control import Commit, CommitChoice, WorkerRef
from kv_transfer.sender import KVSender
from kv_transfer.sender_state import SenderOrder
from prefill_workers.trace import PrefillTrace
from rpc.admission import Admission, Leg
from rpc.engine_request import error_of
from rpc.errors import TransferLostError, WorkerUnavailableError
from telemetry import tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOrder:
    """One prompt to compute, and for whom."""

    request: Request
    transfer_id: int
    epoch: int
    decode_worker: WorkerRef
    prefill_incarnation: int
    hold_s: float  # longest time its blocks may be kept


# Hears where a request's blocks are, in token order, and how many of its tokens are cached.
OnStart = Callable[[list[int], int], None]


class Starts:
    """Tells hand-overs on the event loop that the engine has begun with their prompt."""

    def __init__(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._expected: dict[str, OnStart] = {}

    @contextmanager
    def expect(self, request_id: str, on_start: OnStart) -> Iterator[None]:
        """Call once, and before the first output; for the length of the block."""
        self._expected[request_id] = on_start
        try:
            yield
        finally:
            self._expected.pop(request_id, None)

    def on_start(self, request: Request) -> None:
        """Read the blocks of a request that is about to run; engine thread."""
        if request.request_id in self._expected:
            facts = (request.request_id, list(request.block_ids), request.num_computed_tokens)
            self._event_loop.call_soon_threadsafe(self._tell, *facts)

    def _tell(self, request_id: str, block_ids: list[int], num_cached_tokens: int) -> None:
        on_start = self._expected.pop(request_id, None)
        if on_start is not None:
            on_start(block_ids, num_cached_tokens)


@dataclass(slots=True)
class HeldRequest:
    """A request whose blocks are a transfer's, from its opening to its release."""

    request: Request
    trace: PrefillTrace
    block_ids: list[int] = field(default_factory=list)
    first_tokens: list[CommitChoice] = field(default_factory=list)
    is_let_go: bool = False

    @property
    def is_computed(self) -> bool:
        """Whether each choice has its first token."""
        return len(self.first_tokens) == self.request.num_choices


class HandOver:
    """Runs prompts through the engine and tells the sender what is ready.

    Invariant: a transfer that was opened is committed or cancelled when its stream ends.
    """

    def __init__(
        self,
        *,
        engine_loop: EngineLoop,
        starts: Starts,
        sender: KVSender,
        admission: Admission,
        worker_id: str,
    ) -> None:
        self._worker_id = worker_id
        self._engine_loop = engine_loop
        self._starts = starts
        self._sender = sender
        self._admission = admission
        self._attempts = itertools.count()
        self._held: dict[int, HeldRequest] = {}  # by transfer id

    def follow(self, transfer_id: int) -> None:
        """The decode worker follows this transfer; it calls from within its span."""
        held = self._held.get(transfer_id)
        if held is not None:
            held.trace.followed_by(tracing.current_context())

    async def prefill(self, order: PrefillOrder) -> AsyncGenerator[RequestOutput]:
        """Stream the progress of one prompt, then its first token or MIGRATE."""
        request = order.request
        trace = PrefillTrace(
            request,
            order.transfer_id,
            worker_id=self._worker_id,
            decode_worker_id=order.decode_worker.worker_id,
        )
        held = HeldRequest(request, trace)
        # Another attempt of the same request may still be held here.
        request.request_id = f"{request.request_id}/{next(self._attempts)}"
        await fault_point_async("admission", request_label=request.request_label)
        with self._admission.admit(
            request.request_id, incarnation=order.prefill_incarnation
        ) as leg:
            self._sender.open(
                SenderOrder(
                    transfer_id=order.transfer_id,
                    epoch=order.epoch,
                    decode_worker=order.decode_worker,
                    num_tokens=request.num_tokens,
                    hold_s=order.hold_s,
                    request_label=request.request_label,
                ),
                partial(self._let_go, order.transfer_id, held),
                trace.sent,
            )
            if not held.is_let_go:
                self._held[order.transfer_id] = held
            is_over = False
            try:
                async with aclosing(self._compute(order, leg, held)) as outputs:
                    async for output in outputs:
                        yield output
                is_over = True
            except (EngineFailedError, EngineStoppedError) as error:
                raise WorkerUnavailableError(str(error)) from error
            finally:
                # Also when the caller left while the last message was on its way.
                if not is_over:
                    self._sender.cancel(order.transfer_id)

    async def _compute(
        self, order: PrefillOrder, leg: Leg, held: HeldRequest
    ) -> AsyncGenerator[RequestOutput]:
        leg.when_migrating(partial(self._sender.cancel, order.transfer_id))
        request_id, on_start = held.request.request_id, partial(self._begin, order, held)
        with self._starts.expect(request_id, on_start):
            stream = await self._engine_loop.submit(held.request)
            if held.is_let_go:
                # Given up before the engine knew it, so that nobody else will end it there.
                self._engine_loop.abort(request_id)
            try:
                async for output in stream:
                    leg.is_waiting = False
                    if output.finish_reason is FinishReason.ABORT and leg.is_migrating:
                        yield replace(output, finish_reason=FinishReason.MIGRATE)
                        return
                    self._raise_on_failure(output, held.trace)
                    self._announce(order, held, output)
                    held.trace.computed(output, is_last=held.is_computed)
                    yield output
                    if held.is_computed:
                        return
            finally:
                stream.close()

    def _raise_on_failure(self, output: RequestOutput, trace: PrefillTrace) -> None:
        if output.finish_reason not in {FinishReason.ERROR, FinishReason.ABORT}:
            return
        trace.fail(output.error or "abort")
        if self._engine_loop.failure is not None:
            raise WorkerUnavailableError(output.error or "the engine has failed")
        if output.finish_reason is FinishReason.ERROR:
            raise error_of(output)
        raise TransferLostError("the transfer was given up before its prompt was computed")

    def _begin(
        self, order: PrefillOrder, held: HeldRequest, block_ids: list[int], num_cached_tokens: int
    ) -> None:
        held.block_ids = block_ids
        held.trace.begun()
        self._sender.offer(order.transfer_id, num_cached_tokens, block_ids)

    def _announce(self, order: PrefillOrder, held: HeldRequest, output: RequestOutput) -> None:
        num_tokens = output.num_computed_tokens
        self._sender.offer(order.transfer_id, num_tokens, held.block_ids)
        if output.token_ids:
            held.first_tokens.append(
                CommitChoice(
                    index=output.choice_index,
                    token_id=output.token_ids[0],
                    finish_reason=output.finish_reason or "",
                    logprobs=output.logprobs[0] if output.logprobs else None,
                )
            )
        if held.is_computed:
            commit = Commit(num_tokens=num_tokens, choices=tuple(held.first_tokens))
            self._sender.commit(order.transfer_id, commit)

    def _let_go(self, transfer_id: int, held: HeldRequest, in_flight: Sequence[int]) -> None:
        held.is_let_go = True
        if self._held.get(transfer_id) is held:
            del self._held[transfer_id]
        held.trace.released()
        self._engine_loop.abort(held.request.request_id, in_flight=in_flight)
