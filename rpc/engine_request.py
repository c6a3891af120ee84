"""An engine's request and output as they travel between processes.

Not for the router, which must not reach the engine: it builds the messages itself.
"""

from typing import Final

from relevo.v1 import common_pb2

from engine.request import FinishReason, Request, RequestOutput, RequestTimings
from engine.sampling.params import SamplingParams
from rpc.errors import InvalidRequestError, RequestFailedError, WorkerError
from rpc.logprobs import logprobs_to_proto

_FINISH_REASONS: Final = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
    FinishReason.MIGRATE: common_pb2.FINISH_REASON_MIGRATE,
}
_FINISH_REASON_BY_NUMBER: Final = {number: reason for reason, number in _FINISH_REASONS.items()}


def to_proto(request: Request) -> common_pb2.EngineRequest:
    """Return the message for a request."""
    params = request.sampling_params
    return common_pb2.EngineRequest(
        request_id=request.request_id,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling_params=common_pb2.SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=params.seed,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=params.logit_bias,
            bad_words=[common_pb2.TokenSequence(token_ids=word) for word in params.bad_words],
            allowed_token_ids=params.allowed_token_ids,
            num_logprobs=params.num_logprobs,
            num_prompt_logprobs=params.num_prompt_logprobs,
        ),
        cache_salt=request.cache_salt,
        request_label=request.request_label,
        priority=request.priority,
        choice_index=request.choice_index,
        num_choices=request.num_choices,
    )


def from_proto(message: common_pb2.EngineRequest, *, hand_over: bool = False) -> Request:
    """Return the request for a message; InvalidRequestError when it makes no sense."""
    if not message.request_id:
        raise InvalidRequestError("Got an empty request_id but expected the ingress's id")
    num_tokens, num_prompt_tokens = len(message.token_ids), message.num_prompt_tokens
    if not 1 <= num_prompt_tokens <= num_tokens:
        raise InvalidRequestError(
            f"Got {num_prompt_tokens = } but expected a number in [1, {num_tokens = }]"
        )
    try:
        sampling_params = _params_from_proto(message.sampling_params)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error
    return Request(
        request_id=message.request_id,
        token_ids=list(message.token_ids),
        num_prompt_tokens=num_prompt_tokens,
        sampling_params=sampling_params,
        cache_salt=message.cache_salt,
        request_label=message.request_label,
        priority=message.priority,
        choice_index=message.choice_index,
        num_choices=message.num_choices or 1,
        hand_over=hand_over,
    )


def _params_from_proto(params: common_pb2.SamplingParams) -> SamplingParams:
    has_prompt_logprobs = params.HasField("num_prompt_logprobs")
    return SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        bad_words=tuple(tuple(word.token_ids) for word in params.bad_words),
        allowed_token_ids=tuple(params.allowed_token_ids),
        num_logprobs=params.num_logprobs if params.HasField("num_logprobs") else None,
        num_prompt_logprobs=params.num_prompt_logprobs if has_prompt_logprobs else None,
    )


def finish_reason_to_proto(reason: FinishReason | None) -> common_pb2.FinishReason:
    """Return the number of a reason; UNSPECIFIED when the stream goes on."""
    return common_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_REASONS[reason]


def finish_reason_from_proto(number: common_pb2.FinishReason) -> FinishReason | None:
    """Return the reason of a number; None when the stream goes on."""
    if number == common_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    # A reason that a newer worker knows and we do not is not a success.
    return _FINISH_REASON_BY_NUMBER.get(number, FinishReason.ERROR)


def output_to_tokens(output: RequestOutput) -> common_pb2.Tokens:
    """Return the tokens message of one engine output."""
    tokens = common_pb2.Tokens(
        start_position=output.start_position,
        token_ids=output.token_ids,
        finish_reason=finish_reason_to_proto(output.finish_reason),
        error=output.error or "",
        choice_index=output.choice_index,
    )
    if output.logprobs:
        tokens.logprobs.CopyFrom(logprobs_to_proto(output.start_position, output.logprobs))
    if (prompt := output.prompt_logprobs) is not None:
        message = logprobs_to_proto(prompt.start_position, prompt.entries)
        tokens.prompt_logprobs.CopyFrom(message)
    return tokens


def timings_to_proto(timings: RequestTimings) -> common_pb2.WorkerTimings:
    """Return the durations an engine measured; those of the transfer are the worker's to add."""
    return common_pb2.WorkerTimings(
        prefill_wait_s=timings.prefill_wait_s,
        prefill_s=timings.prefill_s,
        slot_wait_s=timings.slot_wait_s,
        first_decode_s=timings.first_decode_s,
    )


def error_of(output: RequestOutput) -> WorkerError:
    """Return what the caller is told of an output that is an error."""
    text = output.error or "the engine failed the request"
    return InvalidRequestError(text) if output.is_refused else RequestFailedError(text)
