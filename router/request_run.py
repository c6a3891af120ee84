"""Serves one request to its end: choose, try, and after a failure choose again and replay.

1. choose   the dispatcher picks workers at once, or when it is this request's turn
2. try      an Attempt streams tokens; what arrived is kept
3. finish   done
   fail     not admitted anywhere: pause briefly, choose again (RetryBudget)
            after admission: choose again and replay prompt + output with the next epoch, at most
            migration_limit times; the workers that failed are avoided
   migrate  the worker drains: the same, for free
4. error    the request is invalid, its deadline passed, or the budget is spent
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from opentelemetry import trace
from opentelemetry.context import Context
from relevo.v1 import common_pb2

from router.attempt import Attempt, Deliver
from router.dispatcher import Dispatcher, Route
from router.failures import raise_if_final
from router.legs import AttemptPlan, release_prefill
from router.prompt import Prompt
from router.request import FinishReason, RoutedRequest, TokenBatch
from router.request_metrics import RequestMetrics
from router.retry import Failure, RetryBudget
from router.timeline import Timeline
from router.token_merger import TokenMerger
from router.waiting_queue import Place
from router.worker_view import WorkerKey
from router.workers import Workers
from rpc.channel import ChannelPool
from telemetry import attributes, tracing

SpanAttributes: TypeAlias = dict[str, str | int | float | bool]

UNREACHED_CAUSES = frozenset({"unreachable", "stale", "lost"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunServices:
    """What every request shares."""

    dispatcher: Dispatcher
    workers: Workers
    channels: ChannelPool
    metrics: RequestMetrics
    new_budget: Callable[[], RetryBudget]
    spawn: Callable[[asyncio.Future[None]], None]
    now: Callable[[], float]


class RequestRun:
    """Owns one request's output and its attempts, one at a time."""

    def __init__(
        self, request: RoutedRequest, services: RunServices, timeline: Timeline, deadline_s: float
    ) -> None:
        self._request = request
        self._services = services
        self._timeline = timeline
        self._deadline_s = deadline_s
        self._budget = services.new_budget()
        self._merger = TokenMerger(
            len(request.token_ids),
            has_logprobs=request.sampling.HasField("num_logprobs"),
            has_prompt_logprobs=request.sampling.HasField("num_prompt_logprobs"),
        )
        self._epoch = 0
        self.num_predicted_tokens = 0  # of the first routing

    async def serve(self, deliver: Deliver) -> None:
        """Return after the finish was delivered; a RouterError ends it otherwise."""
        while True:
            route = await self._choose()
            result = await self._try(route, deliver)
            if isinstance(result, FinishReason):
                return
            pause_s = self._recover(result)
            if len(self._merger.output) >= self._request.sampling.max_tokens > 0:
                # The last token came, only the message that says so was lost.
                deliver(TokenBatch([], FinishReason.LENGTH))
                return
            await asyncio.sleep(pause_s)

    @property
    def trace_context(self) -> Context | None:
        """Parent of all its spans."""
        return self._request.trace_context

    def time_left_s(self) -> float:
        """Until the deadline; negative after it."""
        return self._deadline_s - self._services.now()

    async def _choose(self) -> Route:
        dispatcher, num_output = self._services.dispatcher, len(self._merger.output)
        prompt = Prompt(
            [*self._request.token_ids, *self._merger.output],
            cache_salt=self._request.cache_salt,
            num_output_tokens=dispatcher.expected_tokens(
                self._request.sampling.max_tokens - num_output
            ),
            session_key=self._request.session_key,
            prefixes=dispatcher.prefixes,
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
            _record_span(attributes.SPAN_QUEUE, start_ns, route.waited_s)
        if self._epoch == 0:
            self.num_predicted_tokens = route.num_predicted_tokens
        dispatcher.routes.append((self._request.request_id, self._epoch + 1, route))
        duration_s = self._services.now() - started_at_s - route.waited_s
        routing_ns = start_ns + round(route.waited_s * 1e9)
        _record_span(attributes.SPAN_ROUTE, routing_ns, duration_s, _route_attributes(route))
        return route

    def _place(self, num_tokens: int) -> Place:
        request = self._request
        return Place(
            tenant=request.tenant,
            priority=1 + (request.priority > 0) - (request.priority < 0),
            num_tokens=num_tokens,
            is_admitted=self._epoch > 0,
        )

    async def _try(self, route: Route, deliver: Deliver) -> FinishReason | Failure:
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
        attempt = Attempt(
            plan,
            channels=self._services.channels,
            merger=self._merger,
            record=record,
            deliver=deliver,
        )
        try:
            with tracing.span(attributes.SPAN_ATTEMPT, attributes=_attempt_attributes(plan)):
                result = await attempt.run()
                if isinstance(result, Failure):
                    trace.get_current_span().set_status(
                        trace.StatusCode.ERROR, f"{result.cause}: {result.message}"
                    )
                return result
        finally:
            if attempt.needs_release:
                release = release_prefill(plan, self._services.channels)
                self._services.spawn(asyncio.ensure_future(release))

    def _engine_request(self) -> common_pb2.EngineRequest:
        request = self._request
        message = common_pb2.EngineRequest(
            request_id=self._attempt_id(),
            token_ids=[*request.token_ids, *self._merger.output],
            num_prompt_tokens=len(request.token_ids),
            sampling_params=request.sampling,
            cache_salt=request.cache_salt,
            request_label=request.request_label,
            priority=request.priority,
        )
        if not self._merger.lacks_prompt_logprobs:
            # What has been told need not be computed again: a replay may use a cache.
            message.sampling_params.ClearField("num_prompt_logprobs")
        return message

    def _attempt_id(self) -> str:
        # A worker that tries again may still hold what it had of the attempt before.
        request_id = self._request.request_id
        return request_id if self._epoch == 1 else f"{request_id}-{self._epoch}"

    def _recover(self, failure: Failure) -> float:
        """Learn from a failure; return the pause before the next attempt, or raise."""
        raise_if_final(failure, time_left_s=self.time_left_s())
        for key in failure.workers:
            self._blame(key, failure.cause)
        pause_s = self._budget.spend(failure)
        if failure.was_admitted:
            self._timeline.num_migrations += 1
            self._services.metrics.migrated(failure.cause)
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


def _record_span(
    name: str, start_ns: int, duration_s: float, facts: SpanAttributes | None = None
) -> None:
    tracing.record_span(
        name,
        start_ns=start_ns,
        duration_s=duration_s,
        parent=tracing.current_context(),
        attributes=facts,
    )


def _route_attributes(route: Route) -> SpanAttributes:
    decision = route.decision
    values: SpanAttributes = {
        attributes.RELEVO_DECODE_WORKER: route.decode.key.worker_id,
        attributes.RELEVO_PREFILL_WORKER: route.prefill.key.worker_id if route.prefill else "",
    }
    for prefix, scored in (
        (attributes.RELEVO_COST_PREFIX, decision.chosen),
        (attributes.RELEVO_COST_NEXT_BEST_PREFIX, decision.next_best),
    ):
        if scored is not None:
            values |= {prefix + name: value for name, value in scored.cost.terms().items()}
    return values


def _attempt_attributes(plan: AttemptPlan) -> SpanAttributes:
    return {
        attributes.RELEVO_REQUEST_ID: plan.request.request_id,
        attributes.RELEVO_EPOCH: plan.epoch,
        attributes.RELEVO_TRANSFER_ID: plan.transfer_id,
        attributes.RELEVO_DECODE_WORKER: plan.decode.key.worker_id,
        attributes.RELEVO_PREFILL_WORKER: plan.prefill.key.worker_id if plan.prefill else "",
    }
