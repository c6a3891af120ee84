"""The spans of one request in the router."""

from typing import TypeAlias

from opentelemetry.context import Context

from router.dispatcher import Route
from router.legs import AttemptPlan
from router.policy import ScoredChoice
from router.request import RoutedRequest
from router.retry import Failure
from telemetry import attributes, tracing

SpanAttributes: TypeAlias = dict[str, str | int | float | bool]


def record_span(
    name: str, start_ns: int, duration_s: float, facts: SpanAttributes | None = None
) -> None:
    """Write down what is over, as a part of the request's span."""
    tracing.record_span(
        name,
        start_ns=start_ns,
        duration_s=duration_s,
        parent=tracing.current_context(),
        attributes=facts,
    )


def route_attributes(route: Route) -> SpanAttributes:
    """Who was chosen, who was next, and what each choice costs."""
    decision = route.decision
    values: SpanAttributes = {
        attributes.RELEVO_DECODE_WORKER: route.decode.key.worker_id,
        attributes.RELEVO_PREFILL_WORKER: route.prefill.key.worker_id if route.prefill else "",
    }
    values |= _cost_attributes(attributes.RELEVO_COST_PREFIX, decision.chosen)
    if (next_best := decision.next_best) is not None:
        values |= _cost_attributes(attributes.RELEVO_NEXT_BEST_COST_PREFIX, next_best)
        prefill, decode = next_best.choice
        values[attributes.RELEVO_NEXT_BEST_PREFIX + "decode"] = decode.key.worker_id
        values[attributes.RELEVO_NEXT_BEST_PREFIX + "prefill"] = (
            prefill.key.worker_id if prefill is not None else ""
        )
    return values


def _cost_attributes(prefix: str, scored: ScoredChoice) -> SpanAttributes:
    return {prefix + name: value for name, value in scored.cost.terms().items()}


def attempt_attributes(plan: AttemptPlan) -> SpanAttributes:
    """Who takes part in one attempt."""
    return {
        attributes.RELEVO_REQUEST_ID: plan.request.request_id,
        attributes.RELEVO_EPOCH: plan.epoch,
        attributes.RELEVO_TRANSFER_ID: str(plan.transfer_id),
        attributes.RELEVO_DECODE_WORKER: plan.decode.key.worker_id,
        attributes.RELEVO_PREFILL_WORKER: plan.prefill.key.worker_id if plan.prefill else "",
    }


def migrated(request: RoutedRequest, failure: Failure) -> None:
    """Note on the request that it goes on elsewhere."""
    if request.trace_context is not None:
        facts = {
            attributes.RELEVO_CAUSE: failure.cause,
            attributes.RELEVO_FAILED_WORKERS: [key.worker_id for key in failure.workers],
        }
        tracing.add_event(request.trace_context, attributes.EVENT_MIGRATED, facts)


def first_token(context: Context | None, first_token_s: float) -> None:
    """Note on the request that its first token is here."""
    if context is not None:
        facts = {attributes.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: first_token_s}
        tracing.add_event(context, attributes.EVENT_FIRST_TOKEN, facts)
