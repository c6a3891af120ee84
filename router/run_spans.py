"""The spans of one request in the router."""

from typing import TypeAlias

from router.dispatcher import Route
from router.legs import AttemptPlan
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
    """Who was chosen and what the choice costs."""
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


def attempt_attributes(plan: AttemptPlan) -> SpanAttributes:
    """Who takes part in one attempt."""
    return {
        attributes.RELEVO_REQUEST_ID: plan.request.request_id,
        attributes.RELEVO_EPOCH: plan.epoch,
        attributes.RELEVO_TRANSFER_ID: str(plan.transfer_id),
        attributes.RELEVO_DECODE_WORKER: plan.decode.key.worker_id,
        attributes.RELEVO_PREFILL_WORKER: plan.prefill.key.worker_id if plan.prefill else "",
    }
