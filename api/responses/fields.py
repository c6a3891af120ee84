"""Every request field of the Responses API, and what becomes of it."""

from collections.abc import Mapping

from api.errors import ApiError, Verdict, invalid, show
from api.parameter_checks import Values, is_neutral

# Read here, or handed on to the judgement of all chats under the same name.
SAME_FIELDS = (
    "model",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "prompt_cache_key",
)
FIELDS = frozenset(
    {
        *SAME_FIELDS,
        "input",
        "instructions",
        "max_output_tokens",
        "reasoning",
        "stream",
        "stream_options",
        "text",
        "tool_choice",
        "tools",
    }
)
# They change neither the text nor how it is served here.
HARMLESS_FIELDS = frozenset(
    {
        "client_metadata",
        "include",
        "metadata",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "user",
    }
)
# Field -> values that ask for nothing beyond what is served.
UNSERVED_FIELDS: Mapping[str, tuple[object, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "store": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_ADVICE: Mapping[str, str] = {
    "conversation": "nothing is kept here; send the whole conversation as input",
    "previous_response_id": "nothing is kept here; send the whole conversation as input",
    "store": "nothing is kept here; leave it out",
}
# How the parameters are called that the answer is judged by.
NAMES = {
    ".function": "",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.type": "text.format.type",
    "response_format.json_schema.name": "text.format.name",
    "response_format.json_schema.schema": "text.format.schema",
}


def check_fields(body: Values, *, is_strict: bool) -> list[str]:
    """Refuse what would be ignored at the client's cost; return the names of unknown fields."""
    unknown: list[str] = []
    for name, value in body.items():
        if name in FIELDS or name in HARMLESS_FIELDS or value is None:
            continue
        neutral = UNSERVED_FIELDS.get(name)
        if neutral is None:
            unknown.append(name)
        elif not is_neutral(value, neutral):
            advice = _ADVICE.get(name, "leave it out")
            raise ApiError(
                Verdict.UNSUPPORTED, f"{name} = {show(value)} is not served; {advice}", param=name
            )
    if unknown and is_strict:
        raise invalid(f"Unknown field {show(unknown[0])}", unknown[0][:64])
    return unknown
