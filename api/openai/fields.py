"""Every request field of OpenAI's API and vLLM's that is known here, and what becomes of it.

Served fields are read elsewhere; unserved ones are refused unless their value changes nothing;
harmless ones are ignored; all others are unknown: named in a header, or refused when the ingress
is strict.
"""

import re
from collections.abc import Mapping, Sequence

from api.errors import ApiError, Verdict, invalid, show
from api.parameter_checks import Values, is_neutral, read_flag

_SAMPLING = frozenset(
    {
        "model",
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "cache_salt",
        "priority",
        "prompt_cache_key",
        "stream",
        "stream_options",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "bad_words",
        "allowed_token_ids",
        "include_stop_str_in_output",
        "logprobs",
        "prompt_logprobs",
        "return_token_ids",
        "response_format",
        "structured_outputs",
    }
)
CHAT_FIELDS = _SAMPLING | {"messages", "top_logprobs"}
COMPLETION_FIELDS = _SAMPLING | {"best_of", "prompt", "echo"}

# They change neither the text nor how it is served here.
HARMLESS_FIELDS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "user",
    }
)

# Field -> values that ask for nothing beyond what is served. Null always does.
UNSERVED_FIELDS: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),  # of a chat; completions serve it
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

# What came in the place of a field; each of them was vLLM's once.
_INSTEAD: Mapping[str, str] = {
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
}

MAX_NAMED_FIELDS = 8
_UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.-]")


def check_fields(body: Values, served: frozenset[str], *, is_strict: bool) -> list[str]:
    """Refuse what would be ignored at the client's cost; return the names of unknown fields."""
    unknown: list[str] = []
    for name, value in body.items():
        if name in served or name in HARMLESS_FIELDS or value is None:
            continue
        neutral = UNSERVED_FIELDS.get(name)
        if neutral is None:
            unknown.append(name)
        elif not is_neutral(value, neutral):
            advice = f"use {_INSTEAD[name]}" if name in _INSTEAD else "leave it out"
            raise ApiError(
                Verdict.UNSUPPORTED,
                f"{name} = {show(value)} is not served; {advice}",
                param=name,
            )
    if unknown and is_strict:
        raise invalid(f"Unknown field {show(unknown[0])}", unknown[0][:64])
    return unknown


def warnings_header(unknown: Sequence[str]) -> str:
    """Name ignored fields in a header value: printable ASCII, a few of them."""
    names = [_UNPRINTABLE.sub("?", name[:64]) for name in unknown[:MAX_NAMED_FIELDS]]
    more = f" and {len(unknown) - MAX_NAMED_FIELDS} more" if len(unknown) > MAX_NAMED_FIELDS else ""
    return f"ignored unknown fields: {', '.join(names)}{more}"


def read_stream(body: Values) -> tuple[bool, bool]:
    """Return whether to stream, and whether to send usage at the end of the stream."""
    is_stream = read_flag(body, "stream")
    options = body.get("stream_options")
    if options is None:
        return is_stream, False
    if not is_stream:
        raise invalid("stream_options may be set only when stream is true", "stream_options")
    if not isinstance(options, dict):
        raise invalid("stream_options must be an object", "stream_options")
    if options.get("continuous_usage_stats"):
        raise ApiError(
            Verdict.UNSUPPORTED,
            "stream_options.continuous_usage_stats is not served",
            param="stream_options.continuous_usage_stats",
        )
    return is_stream, read_flag(
        {"stream_options.include_usage": options.get("include_usage")},
        "stream_options.include_usage",
    )
