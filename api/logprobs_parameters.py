"""Reads how many logprobs a client wants, in each API's own words."""

from api.errors import invalid
from api.parameter_checks import Values, read_flag, read_integer

MAX_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5


def read_chat_logprobs(body: Values) -> int | None:
    """`logprobs: true` switches them on, `top_logprobs` says how many candidates to tell."""
    is_wanted = read_flag(body, "logprobs")
    num_top = read_integer(body, "top_logprobs", low=0, high=MAX_LOGPROBS)
    if num_top and not is_wanted:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    return (num_top or 0) if is_wanted else None


def read_completion_logprobs(body: Values) -> int | None:
    """`logprobs` is the number itself."""
    return read_integer(body, "logprobs", low=0, high=MAX_COMPLETION_LOGPROBS)


def read_logprobs(values: Values) -> int | None:
    """`logprobs` as every face hands it on: a number, or nothing."""
    return read_integer(values, "logprobs", low=0, high=MAX_LOGPROBS)


def read_prompt_logprobs(values: Values) -> int | None:
    """Candidates to tell for each token of the prompt."""
    return read_integer(values, "prompt_logprobs", low=0, high=MAX_LOGPROBS)
