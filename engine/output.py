"""What a request tells its owner after a step, and the durations that go with it."""

from dataclasses import replace

from engine.request import FinishReason, Request, RequestOutput
from engine.step import RowResult


def note_scheduled(request: Request, started_at_s: float) -> bool:
    """A step that begins at `started_at_s` runs this request; True when it is the first one.

    It ends the request's wait.
    """
    if request.first_scheduled_at_s is not None:
        return False
    request.first_scheduled_at_s = started_at_s
    waited_s = started_at_s - request.arrived_at_s
    if request.has_kv_from_peer:
        request.timings.slot_wait_s = waited_s
    else:
        request.timings.prefill_wait_s = waited_s
    return True


def note_sampled(request: Request, ended_at_s: float) -> None:
    """A step that ended at `ended_at_s` gave the request a token."""
    if request.has_first_output:
        return
    request.has_first_output = True
    assert request.first_scheduled_at_s is not None
    ran_s = ended_at_s - request.first_scheduled_at_s
    if request.has_kv_from_peer:
        request.timings.first_decode_s = ran_s
    else:
        request.timings.prefill_s = ran_s


def make_output(
    request: Request,
    *,
    token_ids: tuple[int, ...] = (),
    finish_reason: FinishReason | None = None,
    error: str | None = None,
    with_timings: bool = False,
) -> RequestOutput:
    """The output of one step for one request; its tokens are the newest of the request."""
    return RequestOutput(
        request_id=request.request_id,
        choice_index=request.choice_index,
        start_position=request.num_tokens - len(token_ids),
        token_ids=token_ids,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        finish_reason=finish_reason,
        error=error,
        timings=replace(request.timings) if with_timings else None,
    )


def add_logprobs(outputs: list[RequestOutput], result: RowResult) -> list[RequestOutput]:
    """The outputs and what their step says of probabilities, when it says anything."""
    if not result.logprobs and result.prompt_logprobs is None:
        return outputs
    of_choice = dict(zip(result.entry.request.choices, result.logprobs, strict=False))
    outputs = [
        replace(output, logprobs=(of_choice[output.choice_index],))
        if output.token_ids and of_choice
        else output
        for output in outputs
    ]
    if result.prompt_logprobs is not None:
        outputs[0] = replace(outputs[0], prompt_logprobs=result.prompt_logprobs)
    return outputs


def last_output(
    request: Request, choice_index: int, finish_reason: FinishReason, *, error: str | None = None
) -> RequestOutput:
    """The end of one choice without a token."""
    output = make_output(request, finish_reason=finish_reason, error=error, with_timings=True)
    return replace(output, choice_index=choice_index)


def last_outputs(
    request: Request, finish_reason: FinishReason, *, error: str | None = None
) -> list[RequestOutput]:
    """The end of every choice of a request that was not ended before."""
    return [
        last_output(request, choice_index, finish_reason, error=error)
        for choice_index in sorted(request.open_choices)
    ]
