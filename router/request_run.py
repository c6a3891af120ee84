"""Serves one request to its end: choose, try, and after a failure choose again and replay.

0. start    all choices run together: their prompt is computed once
1. choose   the dispatcher picks workers at once, or when it is this request's turn
2. try      an Attempt streams tokens; what arrived is kept
3. finish   done
   fail     not admitted anywhere: pause briefly, choose again (RetryBudget)
            after admission: choose again and replay prompt + output with the next epoch, at most
            migration_limit times; the workers that failed are avoided
   migrate  the worker drains: the same, for free
   apart    choices that had tokens when their worker failed go on alone, each from 1
4. error    the request is invalid, its deadline passed, or the budget is spent
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context
from relevo.v1 import common_pb2

from router.attempt import Attempt, Deliver
from router.dispatcher import Dispatcher, PastRoute, Route
from router.failures import raise_if_final
from router.legs import AttemptPlan, release_prefill
from router.probation import Probation
from router.prompt import Prompt
from router.request import FinishReason, RoutedRequest, class_of
from router.request_metrics import RequestMetrics
from router.retry import Failure, RetryBudget
from router.run_spans import attempt_attributes, migrated, record_span, route_attributes
from router.timeline import AttemptRecord, Timeline
from router.token_merger import TokenMerger, new_mergers
from router.waiting_queue import Place
from router.worker_view import WorkerKey
from router.workers import Workers
from rpc.channel import ChannelPool
from telemetry import attributes, tracing

UNREACHED_CAUSES = frozenset({"unreachable", "stale", "lost"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunServices:
    """What every request shares."""

    dispatcher: Dispatcher
    workers: Workers
    probation: Probation
    channels: ChannelPool
    metrics: RequestMetrics
    new_budget: Callable[[], RetryBudget]
    spawn: Callable[[asyncio.Future[None]], None]
    now: Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """A choice that goes on alone."""

    merger: TokenMerger
    budget: RetryBudget
    epoch: int


class RequestRun:
    """Owns one request's output and its attempts, one at a time; or those of one choice of it."""

    def __init__(
        self,
        request: RoutedRequest,
        services: RunServices,
        timeline: Timeline,
        deadline_s: float,
        *,
        alone: "Survivor | None" = None,
    ) -> None:
        self._request = request
        self._services = services
        self._timeline = timeline
        self._deadline_s = deadline_s
        self._budget = services.new_budget() if alone is None else alone.budget
        mergers = new_mergers(request) if alone is None else [alone.merger]
        self._mergers = {merger.choice_index: merger for merger in mergers}
        self._epoch = 0 if alone is None else alone.epoch
        self._attempt: Attempt | None = None
        self._apart: list[RequestRun] = []  # one a choice, once they go on alone
        self.num_predicted_tokens = 0  # of the first routing

    async def serve(self, deliver: Deliver) -> None:
        """Return after the last finish was delivered; a RouterError ends it otherwise."""
        while True:
            probation = self._services.probation
            async with probation.turn(is_needed=self._budget.is_suspect) as turn:
                route = await self._choose()
                turn.begin([worker.key for worker in route.workers])
                failure, record = await self._try(route, turn.counted(deliver))
                if failure is None:
                    return
                is_charged = not probation.blames_other(failure, turn)
            pause_s = self._recover(failure, is_charged=is_charged)
            self._finish_complete(deliver, record)
            going_on = self._going_on()
            if not going_on:
                return
            await asyncio.sleep(pause_s)
            if len(going_on) > 1 and self._has_begun(going_on):
                await self._serve_apart(going_on, deliver)
                return

    @property
    def num_choices(self) -> int:
        """All of the request."""
        return self._request.num_choices

    def cancel_choice(self, choice_index: int) -> None:
        """The consumer wants no more of this choice."""
        merger = self._mergers.get(choice_index)
        if merger is None:
            return
        merger.is_cancelled = True
        if self._attempt is not None:
            self._attempt.choice_cancelled(choice_index)
        for run in self._apart:
            run.cancel_choice(choice_index)

    def _going_on(self) -> list[TokenMerger]:
        return [merger for merger in self._mergers.values() if not merger.is_over]

    def _has_begun(self, going_on: list[TokenMerger]) -> bool:
        """Whether its choices have parted; before that they start again together."""
        return len(going_on) < len(self._mergers) or any(merger.output for merger in going_on)

    def _finish_complete(self, deliver: Deliver, record: AttemptRecord) -> None:
        """Finish what has its last token, where only the message that says so was lost."""
        for merger in self._going_on():
            if len(merger.output) >= self._request.sampling.max_tokens > 0:
                merger.finish_reason = FinishReason.LENGTH
                deliver(merger.newest(0, FinishReason.LENGTH), record)

    async def _serve_apart(self, going_on: list[TokenMerger], deliver: Deliver) -> None:
        """Serve each choice by itself; the first error ends all."""
        self._apart = [
            RequestRun(
                self._request,
                self._services,
                self._timeline,
                self._deadline_s,
                alone=Survivor(merger=merger, budget=self._budget.fork(), epoch=self._epoch),
            )
            for merger in going_on
        ]
        tasks = [asyncio.create_task(run.serve(deliver)) for run in self._apart]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def trace_context(self) -> Context | None:
        """Parent of all its spans."""
        return self._request.trace_context

    def time_left_s(self) -> float:
        """Until the deadline; negative after it."""
        return self._deadline_s - self._services.now()

    async def _choose(self) -> Route:
        dispatcher, output = self._services.dispatcher, self._output()
        prompt = Prompt(
            [*self._request.token_ids, *output],
            cache_salt=self._request.cache_salt,
            num_output_tokens=dispatcher.expected_tokens(
                self._request.sampling.max_tokens - len(output)
            ),
            num_choices=max(len(self._going_on()), 1),
            session_key=self._request.session_key,
            skips_cache=any(each.lacks_prompt_logprobs for each in self._going_on()),
        )
        start_ns, started_at_s = time.time_ns(), self._services.now()
        route = await dispatcher.choose(
            prompt,
            place=self._place(len(prompt)),
            excluded=self._budget.excluded,
            timeout_s=self.time_left_s(),
        )
        self._timeline.add_queue(route.waited_s)
        if route.waited_s > 0.0:
            record_span(attributes.SPAN_QUEUE, start_ns, route.waited_s)
        if self._epoch == 0:
            self.num_predicted_tokens = route.num_predicted_tokens
        dispatcher.routes.append(
            PastRoute(
                request_id=self._request.request_id,
                tenant=self._request.tenant.name,
                epoch=self._epoch + 1,
                route=route,
            )
        )
        duration_s = self._services.now() - started_at_s - route.waited_s
        routing_ns = start_ns + round(route.waited_s * 1e9)
        record_span(attributes.SPAN_ROUTE, routing_ns, duration_s, route_attributes(route))
        return route

    def _place(self, num_tokens: int) -> Place:
        request = self._request
        return Place(
            tenant=request.tenant,
            priority=class_of(request.priority),
            num_tokens=num_tokens,
            is_admitted=self._epoch > 0,
        )

    async def _try(self, route: Route, deliver: Deliver) -> tuple[Failure | None, AttemptRecord]:
        self._epoch += 1
        prefill_id = route.prefill.key.worker_id if route.prefill is not None else ""
        record = self._timeline.start_attempt(
            prefill_worker_id=prefill_id, decode_worker_id=route.decode.key.worker_id
        )
        plan = AttemptPlan(
            request=self._engine_request(),
            prefill=route.prefill,
            decode=route.decode,
            transfer_id=route.transfer_id,
            epoch=self._epoch,
            timeout_s=max(self.time_left_s(), 0.001),
        )
        attempt = self._attempt = Attempt(
            plan,
            channels=self._services.channels,
            mergers={merger.choice_index: merger for merger in self._going_on()},
            record=record,
            deliver=deliver,
            now=self._services.now,
        )
        try:
            with tracing.span(attributes.SPAN_ATTEMPT, attributes=attempt_attributes(plan)):
                failure = await attempt.run()
                if failure is not None:
                    trace.get_current_span().set_status(
                        trace.StatusCode.ERROR, f"{failure.cause}: {failure.message}"
                    )
                return failure, record
        finally:
            self._attempt = None
            if attempt.needs_release:
                release = release_prefill(plan, self._services.channels)
                self._services.spawn(asyncio.ensure_future(release))

    def _output(self) -> list[int]:
        """What is replayed: of a choice that goes on alone; several together have none."""
        going_on = self._going_on()
        return going_on[0].output if len(going_on) == 1 else []

    def _engine_request(self) -> common_pb2.EngineRequest:
        request, going_on = self._request, self._going_on()
        message = common_pb2.EngineRequest(
            request_id=self._attempt_id(),
            token_ids=[*request.token_ids, *self._output()],
            num_prompt_tokens=len(request.token_ids),
            sampling_params=request.sampling,
            cache_salt=request.cache_salt,
            request_label=request.request_label,
            priority=request.priority,
            choice_index=min((merger.choice_index for merger in going_on), default=0),
            num_choices=max(len(going_on), 1),
        )
        if not any(merger.lacks_prompt_logprobs for merger in going_on):
            # What has been told need not be computed again: a replay may use a cache.
            message.sampling_params.ClearField("num_prompt_logprobs")
        return message

    def _attempt_id(self) -> str:
        # A worker that tries again may still hold what it had of the attempt before.
        request_id = self._request.request_id
        if len(self._mergers) < self.num_choices:
            request_id += f"-choice-{next(iter(self._mergers))}"
        return request_id if self._epoch == 1 else f"{request_id}-{self._epoch}"

    def _recover(self, failure: Failure, *, is_charged: bool) -> float:
        """Learn from a failure; return the pause before the next attempt, or raise."""
        raise_if_final(failure, time_left_s=self.time_left_s())
        for key in failure.workers:
            self._blame(key, failure.cause)
        pause_s = self._budget.spend(failure, is_charged=is_charged)
        if failure.was_admitted:
            self._timeline.num_migrations += 1
            self._services.metrics.migrated(failure.cause)
            migrated(self._request, failure)
        return pause_s

    def _blame(self, key: WorkerKey, cause: str) -> None:
        workers = self._services.workers
        worker = workers.get(key)
        if cause == "transfer":
            workers.distrust_links(key)
        elif worker is not None and cause == "refused":
            worker.refuse()
        elif worker is not None and cause in UNREACHED_CAUSES:
            worker.suspect()
            workers.look_again()
