"""Every request field of Anthropic's Messages API, and what becomes of it."""

from collections.abc import Mapping, Sequence

from api.errors import ApiError, Verdict, invalid, show
from api.parameter_checks import Values, is_neutral

COUNTED_FIELDS = frozenset({"messages", "model", "system", "thinking", "tool_choice", "tools"})
FIELDS = COUNTED_FIELDS | {
    "max_tokens",
    "output_config",
    "stop_sequences",
    "stream",
    "temperature",
    "top_k",
    "top_p",
}
# They change neither the text nor how it is served here.
HARMLESS_FIELDS = frozenset(
    {"cache_control", "context_management", "inference_geo", "metadata", "service_tier"}
)
# Field -> values that ask for nothing beyond what is served.
UNSERVED_FIELDS: Mapping[str, Sequence[object]] = {
    "container": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
# How the parameters are called that the answer is judged by.
NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    ".function.parameters": ".input_schema",
    ".function": "",
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
        elif not is_neutral(value, tuple(neutral)):
            raise ApiError(Verdict.UNSUPPORTED, f"{name} is not served; leave it out", param=name)
    if unknown and is_strict:
        raise invalid(f"Unknown field {show(unknown[0])}", unknown[0][:64])
    return unknown
