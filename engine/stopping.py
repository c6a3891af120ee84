"""When a request ends by its last token."""

from engine.request import FinishReason, Request


def finish_reason(
    request: Request, *, eos_token_ids: tuple[int, ...], max_model_len: int
) -> FinishReason | None:
    """Why the request ends with its newest token, or None when it goes on."""
    params = request.sampling_params
    token_id = request.token_ids[-1]
    if request.new_token_mask is not None and token_id in eos_token_ids:
        return FinishReason.STOP  # a finished grammar allows nothing else, min_tokens or not
    ends = token_id in params.stop_token_ids or (
        token_id in eos_token_ids and not params.ignore_eos
    )
    if ends and request.num_output_tokens >= params.min_tokens:
        return FinishReason.STOP
    if request.num_output_tokens >= params.max_tokens or request.num_tokens >= max_model_len:
        return FinishReason.LENGTH
    return None


def may_go_on(request: Request, *, max_model_len: int) -> bool:
    """Whether the request can run on after its next token, whichever that is."""
    params = request.sampling_params
    return (
        not request.hand_over
        and request.num_output_tokens + 1 < params.max_tokens
        and request.num_tokens + 1 < max_model_len
    )


def banned_token_ids(request: Request, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens that would end the request before it has its minimum."""
    params = request.sampling_params
    if request.num_output_tokens >= params.min_tokens:
        return ()
    return params.stop_token_ids + (() if params.ignore_eos else eos_token_ids)
