"""What the span and the log say about a request; never a word of its text."""

import logging
from collections.abc import Sequence

from opentelemetry.trace import Span

from api.generation_request import GenerationRequest
from api.text_stream import TextStream
from api.usage import Usage
from telemetry import attributes
from telemetry.logs import request_id

_LOGGER = logging.getLogger(__name__)


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
            attributes.RELEVO_REQUEST_LABEL: request_id.get(),
        }
    )


def describe_answer(span: Span, response_id: str, streams: Sequence[TextStream]) -> None:
    """Write down what came of it, in the span and in one line of the log."""
    usage = Usage.of(streams)
    report = streams[0].report
    choices = [choice for stream in streams for choice in stream.choices]
    _LOGGER.info(
        "%s: %d+%d tokens (%d cached), %s, first token %s s, %.3f s in all, %s -> %s",
        response_id,
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
        ",".join(choice.finish_reason or "cut off" for choice in choices),
        "-" if report.first_token_s is None else f"{report.first_token_s:.3f}",
        report.elapsed_s,
        report.prefill_worker_id or "alone",
        report.decode_worker_id or "nowhere",
    )
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
        }
    )
    if report.first_token_s is not None:
        span.set_attribute(attributes.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, report.first_token_s)
