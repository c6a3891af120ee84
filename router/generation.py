"""One running request as its consumer sees it: batches of tokens, a report, a way to end it.

generate()       nothing runs yet
first anext      a task starts to serve the request; tokens go into a buffer as they arrive
anext            takes all that is there of one choice; a slow consumer gets larger batches, and
                 one that leaves more than MAX_UNREAD_TOKENS lying is ended
gather()         the consumer shows nothing on the way: it is woken for many tokens at once
finish or error  each choice's last batch carries its finish reason; an error is raised once
end_choice()     the consumer has all it wants of one choice; the others go on
aclose()         at any moment, from any task: every call on the workers is cancelled
"""

import asyncio
import logging
from collections.abc import Callable

from router.errors import (
    GenerationFailed,
    NoWorkers,
    RequestTimeout,
    RouterError,
    SlowReader,
)
from router.report import RequestReport
from router.request import FinishReason, TokenBatch
from router.request_metrics import RequestMetrics
from router.request_run import RequestRun
from router.run_spans import first_token
from router.timeline import AttemptRecord, Timeline
from telemetry import logs, tracing

STOPPED_RETRY_S = 1.0
BACKSTOP_S = 0.1
MAX_UNREAD_TOKENS = 2048

_LOGGER = logging.getLogger(__name__)


class Generation:
    """An async iterator of TokenBatch for one consumer.

    Invariants: after `aclose`, a finish or an error nothing of it runs; it ends exactly once.
    """

    def __init__(
        self,
        run: RequestRun,
        timeline: Timeline,
        *,
        metrics: RequestMetrics,
        running: set["Generation"],
        on_end: Callable[[RequestReport], None],
    ) -> None:
        self._run = run
        self._timeline = timeline
        self._metrics = metrics
        self._running = running
        self._on_end = on_end
        self._task: asyncio.Task[None] | None = None
        self._pending: dict[int, TokenBatch] = {}  # by choice index; the oldest first
        self._num_unread = 0  # tokens in `_pending`
        self._num_gathered = 1  # so many of them wake the consumer; a choice's end always does
        self._unfinished = set(range(run.num_choices))
        self._untaken = set(range(run.num_choices))  # choices whose end was not taken
        self._error: BaseException | None = None
        self._is_over = False
        self._is_stopped = False
        self._is_overrun = False  # the consumer left too much lying
        self._close_reason = "abort"
        self._waiter: asyncio.Future[None] | None = None  # of the consumer, while it waits

    @property
    def report(self) -> RequestReport:
        """What became of it so far."""
        return self._timeline.report()

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> TokenBatch:
        while True:
            if self._pending:
                return self._take_batch()
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._is_over or not self._untaken:
                raise StopAsyncIteration
            self._start()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def gather(self, num_tokens: int) -> None:
        """Wake the consumer for no fewer tokens than these, or for the end of a choice."""
        assert 0 < num_tokens <= MAX_UNREAD_TOKENS, "more would end it as a slow reader"
        self._num_gathered = num_tokens

    def end_choice(self, choice_index: int) -> None:
        """End one choice: nothing more of it comes. The last one is ended by `aclose`."""
        if (unread := self._pending.pop(choice_index, None)) is not None:
            self._num_unread -= len(unread.token_ids)
        self._unfinished.discard(choice_index)
        self._untaken.discard(choice_index)
        self._run.cancel_choice(choice_index)

    async def aclose(self, finish_reason: FinishReason | None = None) -> None:
        """Cancel it everywhere; `finish_reason` tells the report if the consumer ended it well."""
        if finish_reason is not None:
            self._close_reason = finish_reason.value
        if self._task is not None and not self._task.done():
            # After the finish its last calls are being closed: let that end by itself.
            if self._unfinished:
                self._task.cancel()
            await asyncio.wait({self._task})
        # A task that was cancelled before its first step has run none of its code.
        self._end(None, self._close_reason)
        if not self._is_stopped:
            self._pending.clear()
            self._error = None
        self._is_over = True
        self._wake()

    async def stop(self) -> None:
        """The router stops: the consumer gets an error."""
        self._is_stopped = True
        await self.aclose()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take_batch(self) -> TokenBatch:
        batch = self._pending.pop(next(iter(self._pending)))
        self._num_unread -= len(batch.token_ids)
        if batch.finish_reason is not None:
            self._untaken.discard(batch.choice_index)
        return batch

    def _start(self) -> None:
        if self._task is None:
            self._running.add(self)
            self._task = asyncio.create_task(self._serve(), name="router-request")

    def _deliver(self, batch: TokenBatch, record: AttemptRecord) -> None:
        index = batch.choice_index
        if index not in self._unfinished:
            return  # ended by the consumer a moment ago
        if num_tokens := len(batch.token_ids):
            if (since_last_s := self._timeline.since_last_token_s(index)) is not None:
                self._metrics.tokens_arrived(num_tokens, since_last_s)
            is_first = self._timeline.first_token_s is None
            self._timeline.add_tokens(num_tokens, record, choice_index=index)
            if is_first:
                first_token(self._run.trace_context, self._timeline.first_token_s or 0.0)
        if batch.finish_reason is not None:
            self._unfinished.discard(index)
            if not self._unfinished:
                self._timeline.end(batch.finish_reason.value)
        pending = self._pending.get(index)
        self._pending[index] = batch if pending is None else pending.joined(batch)
        self._num_unread += num_tokens
        if self._num_unread > MAX_UNREAD_TOKENS and self._task is not None:
            self._is_overrun = True
            self._task.cancel()
        if batch.finish_reason is not None or self._num_unread >= self._num_gathered:
            self._wake()

    async def _serve(self) -> None:
        if self._run.trace_context is not None:
            tracing.attach_for_task(self._run.trace_context)
        error: BaseException | None = None
        finish_reason = "error"
        try:
            with logs.request_scope(self._timeline.request_id):
                # A backstop: queue and calls have the deadline itself, and know what it means.
                async with asyncio.timeout(max(self._run.time_left_s(), 0.0) + BACKSTOP_S):
                    await self._run.serve(self._deliver)
        except asyncio.CancelledError:
            finish_reason = self._close_reason
            raise
        except TimeoutError:
            error = RequestTimeout("the deadline passed")
        except RouterError as told:
            error = told
        except Exception:
            # The boundary of this request: a bug of ours must not reach its neighbours.
            _LOGGER.exception("Request %s broke", self._timeline.request_id)
            error = GenerationFailed("internal error")
        finally:
            self._end(error, finish_reason)

    def _end(self, error: BaseException | None, finish_reason: str) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._timeline.end(finish_reason)
        if self._is_stopped and error is None:
            error = NoWorkers("the router stops", STOPPED_RETRY_S)
        if self._is_overrun and error is None:
            error = SlowReader(f"more than {MAX_UNREAD_TOKENS} tokens wait to be read")
        # A finish that was delivered stands, whatever closing the calls brought up.
        self._error = error if self._unfinished else None
        self._wake()
        self._metrics.ended(self.report, error, self._run.num_predicted_tokens)
        self._running.discard(self)
        self._on_end(self.report)
