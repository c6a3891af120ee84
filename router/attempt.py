"""One try to serve a request on chosen workers.

1. Both legs open at once: Decode, and Prefill if a prefill worker takes part.
2. Prefill tells its progress and the first token of each choice; Decode is admitted and tells every
   token it knows. `TokenMerger` makes one stream of both, delivered in the moment it arrives.
3. The first decisive event settles the attempt: the finish of its last choice, a failed leg, a
   worker without a sign of life. Prefill may fail or end once a first token is out: the rest is the
   decode worker's.
4. Whatever ends it, also a cancel: both calls are cancelled, which frees what the workers hold; the
   prefill worker is also told to release, since its call may have ended just before.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

import grpc
from relevo.v1 import common_pb2, decode_pb2, prefill_pb2

from router.failures import failure_of, failure_on
from router.legs import AttemptPlan, cancel_choice, open_decode, open_prefill
from router.logprobs import read_logprobs
from router.request import FinishReason, TokenBatch
from router.retry import Failure
from router.timeline import AttemptRecord
from router.token_merger import TokenGapError, TokenMerger, TokenPiece
from router.worker_state import WorkerState
from router.worker_view import WorkerKey
from rpc.channel import ChannelPool

# A decode worker may finish before the prefill worker's last message, with its timings, is here.
LAST_PREFILL_MESSAGE_S = 0.25

FINISH_REASONS = {
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}

_LOGGER = logging.getLogger(__name__)


class Deliver(Protocol):
    """Hands tokens to the consumer; must not block."""

    def __call__(self, batch: TokenBatch, record: AttemptRecord) -> None:
        """With a finish reason it is the last call for that choice."""
        ...


class Attempt:
    """Owns the calls of one attempt. Invariant: when `run` is over, none is open."""

    def __init__(
        self,
        plan: AttemptPlan,
        *,
        channels: ChannelPool,
        mergers: Mapping[int, TokenMerger],  # by choice index
        record: AttemptRecord,
        deliver: Deliver,
        now: Callable[[], float],
    ) -> None:
        self._plan = plan
        self._channels = channels
        self._mergers = mergers
        self._record = record
        self._deliver = deliver
        self._now = now
        self._settled: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        self._answered: set[WorkerKey] = set()
        self._num_known = sum(len(merger.output) for merger in mergers.values())
        self._cancels: set[asyncio.Future[None]] = set()
        self._unprefilled = set(mergers)  # choices whose first token Prefill may still tell
        self._has_decoded = False  # the decode worker has all the KV it needs
        self._prefill_over = asyncio.Event()  # its tokens came, or there are none to come
        if plan.prefill is None:
            self._prefill_over.set()

    async def run(self) -> Failure | None:
        """Serve until every choice is over; a failure is returned, not raised."""
        for merger in self._mergers.values():
            merger.start_attempt()
        self._settle_if_complete()  # all it was meant for may have been cancelled while it waited
        plan = self._plan
        legs = [asyncio.create_task(self._guard(plan.decode, self._run_decode))]
        if plan.prefill is not None:
            leg = self._guard(plan.prefill, partial(self._run_prefill, plan.prefill))
            legs.append(asyncio.create_task(leg))
        for worker in plan.workers:
            worker.attempts.add(self)
        try:
            return await self._settled
        finally:
            for worker in plan.workers:
                worker.attempts.discard(self)
                worker.drop_pick(plan.transfer_id)
            for leg_task in legs:
                leg_task.cancel()
            # With the Decode call all its choices end; to cancel one means nothing now.
            for cancel in self._cancels:
                cancel.cancel()
            await asyncio.gather(*legs, *self._cancels, return_exceptions=True)

    @property
    def needs_release(self) -> bool:
        """Whether KV may lie on the prefill worker that nobody else gives back.

        A call that ended there just before the cancel arrived keeps its KV, and we cannot tell. A
        decode worker gives back what it took; one whose call is cancelled early has not begun to.
        """
        is_finished = (
            self._settled.done()
            and not self._settled.cancelled()
            and self._settled.result() is None
        )
        return self._plan.prefill is not None and not (is_finished and self._has_decoded)

    def choice_cancelled(self, choice_index: int) -> None:
        """The consumer wants no more of a choice: end it on the worker, too."""
        if choice_index not in self._mergers or self._settled.done():
            return
        self._settle_if_complete()
        if not self._settled.done():
            cancel = asyncio.ensure_future(cancel_choice(self._plan, choice_index, self._channels))
            self._cancels.add(cancel)
            cancel.add_done_callback(self._cancels.discard)

    def lose_worker(self, key: WorkerKey, reason: str) -> None:
        """One of the workers shows no sign of life."""
        plan = self._plan
        is_prefill = plan.prefill is not None and key == plan.prefill.key
        if is_prefill and self._has_decoded:
            return
        worker = plan.prefill if plan.prefill is not None and is_prefill else plan.decode
        self._settle(failure_on(worker.key, "lost", reason))

    @property
    def _has_tokens(self) -> bool:
        return sum(len(merger.output) for merger in self._mergers.values()) > self._num_known

    def _settle(self, failure: Failure | None) -> None:
        if not self._settled.done():
            self._settled.set_result(failure)

    def _settle_if_complete(self) -> None:
        if all(merger.is_over for merger in self._mergers.values()):
            self._settle(None)

    async def _guard(self, worker: WorkerState, leg: Callable[[], Awaitable[None]]) -> None:
        """The one place where a leg's exceptions become a failure."""
        try:
            await leg()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Not we were cancelled but the call: someone closed its channel.
            self._leg_failed(worker, failure_on(worker.key, "lost", "its channel was closed"))
        except grpc.aio.AioRpcError as error:
            has_answered = worker.key in self._answered
            self._leg_failed(worker, failure_of(error, worker.key, has_answered=has_answered))
        except TokenGapError as error:
            self._settle(failure_on(worker.key, "gap", str(error)))
        except Exception as error:
            _LOGGER.exception("A leg on %s broke", worker.key.worker_id)
            self._leg_failed(worker, failure_on(worker.key, "error", repr(error)))

    def _leg_failed(self, worker: WorkerState, failure: Failure) -> None:
        prefill = self._plan.prefill
        if worker is prefill and self._has_tokens:
            _LOGGER.info("Prefill ended late: %s", failure.message)
            self._prefill_over.set()
            return
        if failure.cause == "transfer" and prefill is not None:
            # The KV is lost, not the decode worker: it may hold much of it already.
            failure = replace(failure, workers=frozenset({prefill.key}))
        self._settle(failure)

    # Prefill.

    async def _run_prefill(self, worker: WorkerState) -> None:
        call = open_prefill(self._plan, self._channels)
        try:
            async for response in call:
                self._acknowledge(worker)
                self._take_prefill(response, worker)
        finally:
            call.cancel()
        if not self._prefill_over.is_set() and not self._has_tokens:
            self._settle(failure_on(worker.key, "error", "prefill ended without a token"))
        self._prefill_over.set()
        for merger in self._mergers.values():
            merger.close_gap()

    def _take_prefill(self, response: prefill_pb2.PrefillResponse, worker: WorkerState) -> None:
        worker.worked_at_s = self._now()
        if response.HasField("timings"):
            self._record.add_prefill(response.timings)
        if response.WhichOneof("message") == "progress":
            num_cached = response.progress.num_cached_tokens
            self._record.num_cached_tokens = max(self._record.num_cached_tokens, num_cached)
        else:
            self._take_tokens(response.tokens, worker)
            if response.tokens.token_ids or response.tokens.finish_reason:
                self._unprefilled.discard(response.tokens.choice_index)
            if not self._unprefilled:
                self._prefill_over.set()

    # Decode.

    async def _run_decode(self) -> None:
        worker = self._plan.decode
        call = open_decode(self._plan, self._channels)
        try:
            async for response in call:
                self._acknowledge(worker)
                await self._take_decode(response, worker)
        finally:
            call.cancel()
        if not all(each.is_cancelled or each.finish_reason for each in self._mergers.values()):
            self._settle(failure_on(worker.key, "error", "the stream ended without a finish"))

    async def _take_decode(self, response: decode_pb2.DecodeResponse, worker: WorkerState) -> None:
        record, is_local = self._record, self._plan.prefill is None
        record.kv_transfer_bytes = max(record.kv_transfer_bytes, response.kv_transfer_bytes)
        if is_local:
            cached = max(record.num_cached_tokens, response.num_cached_tokens)
            record.num_cached_tokens = cached
        if response.HasField("timings"):
            record.add_decode(response.timings)
            if is_local:
                record.add_prefill(response.timings)
        if response.WhichOneof("message") != "tokens":
            return
        worker.worked_at_s = self._now()
        self._has_decoded = True
        if response.tokens.finish_reason and not self._prefill_over.is_set():
            await _wait_briefly(self._prefill_over.wait())
        self._take_tokens(response.tokens, worker)

    # Both.

    def _acknowledge(self, worker: WorkerState) -> None:
        if worker.key not in self._answered:
            self._answered.add(worker.key)
            worker.acknowledge_pick(self._plan.transfer_id)

    def _take_tokens(self, tokens: common_pb2.Tokens, worker: WorkerState) -> None:
        reason = FINISH_REASONS.get(tokens.finish_reason)
        if tokens.finish_reason and reason is None:
            self._settle(self._ended_badly(tokens, worker))
            return
        merger = self._mergers.get(tokens.choice_index)
        if merger is None:
            raise TokenGapError(f"Got tokens of choice {tokens.choice_index} but expected others")
        if self._settled.done() or merger.is_over:
            return
        # Only Prefill's token can still fill a gap before what the decode worker sends.
        may_wait = worker is self._plan.decode and not self._prefill_over.is_set()
        if tokens.HasField("prompt_logprobs"):
            prompt = tokens.prompt_logprobs
            merger.add_prompt_logprobs(prompt.start_position, read_logprobs(prompt))
        # An absent message reads like an empty one, but at the cost of all the rest of this.
        logprobs = read_logprobs(tokens.logprobs) if tokens.HasField("logprobs") else ()
        piece = TokenPiece(tokens.start_position, tokens.token_ids[:], logprobs)
        added = merger.add(piece, may_wait=may_wait)
        merger.finish_reason = merger.finish_reason or reason
        last_reason = merger.finish_reason if merger.is_finished else None
        if added or last_reason is not None:
            self._deliver(merger.newest(len(added), last_reason), self._record)
        if last_reason is not None:
            self._settle_if_complete()

    def _ended_badly(self, tokens: common_pb2.Tokens, worker: WorkerState) -> Failure:
        if tokens.finish_reason == common_pb2.FINISH_REASON_MIGRATE:
            return failure_on(worker.key, "migrate", "it drains")
        return failure_on(worker.key, "error", tokens.error or "the request was ended there")


async def _wait_briefly(event: Awaitable[object]) -> None:
    try:
        async with asyncio.timeout(LAST_PREFILL_MESSAGE_S):
            await event
    except TimeoutError:
        return
