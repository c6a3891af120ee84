"""What the span of a request says about it; of its text nothing, unless that was asked for."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode

from api.caller import Caller
from api.errors import to_api_error
from api.generation_request import GenerationRequest
from api.text_stream import TextStream
from api.transcript import content_attributes
from api.usage import Usage
from router.report import RequestReport
from telemetry import attributes, tracing
from telemetry.logs import request_id


@contextmanager
def request_span(caller: Caller, parent: Context | None = None) -> Iterator[Span]:
    """Run the body inside the span of one request; what ends it badly is named on it."""
    with tracing.span(
        attributes.SPAN_REQUEST,
        kind=SpanKind.SERVER,
        parent=parent,
        # At once: a request that is refused must be found, by its own tenant only.
        attributes={
            attributes.RELEVO_REQUEST_LABEL: request_id.get(),
            attributes.RELEVO_TENANT: caller.tenant.name,
        },
        records_exceptions=False,
    ) as span:
        try:
            yield span
        except asyncio.CancelledError:
            span.set_attribute(attributes.ERROR_TYPE, "cancelled")
            raise
        except Exception as error:
            note_failure(error)
            raise


def note_failure(error: Exception) -> None:
    """Name the verdict on the current span; only the server's own faults make it a failed one."""
    face, span = to_api_error(error).face, trace.get_current_span()
    span.set_attribute(attributes.ERROR_TYPE, face.code)
    if face.http_status >= 500:
        span.set_status(StatusCode.ERROR, face.code)


def describe_request(
    span: Span, request: GenerationRequest, *, operation: str, model: str, is_stream: bool
) -> None:
    """Write down what was asked for."""
    span.set_attributes(
        {
            attributes.GEN_AI_OPERATION_NAME: operation,
            attributes.GEN_AI_PROVIDER_NAME: attributes.PROVIDER,
            attributes.GEN_AI_REQUEST_MODEL: model,
            attributes.GEN_AI_REQUEST_MAX_TOKENS: request.max_tokens,
            attributes.GEN_AI_REQUEST_TEMPERATURE: request.temperature,
            attributes.GEN_AI_REQUEST_TOP_P: request.top_p,
            attributes.GEN_AI_REQUEST_TOP_K: request.top_k,
            attributes.GEN_AI_REQUEST_SEED: request.seed,
            attributes.GEN_AI_REQUEST_STREAM: is_stream,
        }
    )


def describe_answer(span: Span, response_id: str, streams: Sequence[TextStream]) -> None:
    """Write down what came of it, in the span."""
    usage = Usage.of(streams)
    report = streams[0].report
    choices = [choice for stream in streams for choice in stream.choices]
    span.set_attributes(
        {
            attributes.GEN_AI_RESPONSE_ID: response_id,
            attributes.GEN_AI_RESPONSE_FINISH_REASONS: [
                choice.finish_reason for choice in choices if choice.finish_reason
            ],
            attributes.GEN_AI_USAGE_INPUT_TOKENS: usage.prompt_tokens,
            attributes.GEN_AI_USAGE_OUTPUT_TOKENS: usage.completion_tokens,
            attributes.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: usage.cached_tokens,
            attributes.RELEVO_REQUEST_ID: streams[0].request_id,
            attributes.RELEVO_PREFILL_WORKER: report.prefill_worker_id,
            attributes.RELEVO_DECODE_WORKER: report.decode_worker_id,
            attributes.RELEVO_NUM_MIGRATIONS: report.num_migrations,
            **_time_parts(report),
        }
    )
    if transcripts := [each for stream in streams if (each := stream.transcript) is not None]:
        span.set_attributes(content_attributes(transcripts))
    if report.first_token_s is not None:
        span.set_attribute(attributes.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, report.first_token_s)


def _time_parts(report: RequestReport) -> dict[str, float]:
    """Where the time went, of requests that got so far; each set sums exactly."""
    parts: dict[str, float] = {}
    if report.first_token_s is not None:
        for name, seconds in report.first_token_parts.items():
            parts[f"{attributes.RELEVO_FIRST_TOKEN_PREFIX}{name}_s"] = seconds
    if report.second_token_s is not None:
        parts[attributes.RELEVO_SECOND_TOKEN_S] = report.second_token_s
        for name, seconds in report.second_token_parts.items():
            parts[f"{attributes.RELEVO_SECOND_TOKEN_PREFIX}{name}_s"] = seconds
    return parts
