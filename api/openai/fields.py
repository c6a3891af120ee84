"""Every request field of OpenAI's API and vLLM's that is known here, and what becomes of it.

Served fields are read elsewhere; unserved ones are refused unless their value changes nothing;
harmless ones are ignored; all others are unknown: named in a header, or refused when the ingress
is strict.
"""

import re
from collections.abc import Mapping, Sequence

from api.call import Streaming
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
        "truncate_prompt_tokens",
    }
)
CHAT_FIELDS = _SAMPLING | {
    "chat_template_kwargs",
    "messages",
    "parallel_tool_calls",
    "reasoning_effort",
    "tool_choice",
    "tools",
    "top_logprobs",
}
COMPLETION_FIELDS = _SAMPLING | {"best_of", "prompt", "echo"}

# They change neither the text nor how it is served here; their types are judged all the same.
_HARMLESS: Mapping[str, type] = {
    "metadata": dict,
    "prompt_cache_retention": str,
    "safety_identifier": str,
    "service_tier": str,
    "session_id": str,
    "store": bool,
    "user": str,
}
HARMLESS_FIELDS = frozenset(_HARMLESS)
_WORDS: Mapping[type, str] = {dict: "an object", str: "a string", bool: "true or false"}
# What `service_tier` an answer was served in, whichever was asked for.
SERVICE_TIER = "default"

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
    "parallel_tool_calls": (True, False),  # of a completion
    "reasoning_effort": ("none",),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
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
        if name in served or value is None:
            continue
        if name in _HARMLESS:
            if not isinstance(value, _HARMLESS[name]):
                raise invalid(f"{name} must be {_WORDS[_HARMLESS[name]]}, got {show(value)}", name)
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


def read_stream(body: Values) -> Streaming:
    """Read stream and stream_options."""
    is_stream = read_flag(body, "stream")
    options = body.get("stream_options")
    if options is None:
        return Streaming(is_stream=is_stream)
    if not is_stream:
        raise invalid("stream_options may be set only when stream is true", "stream_options")
    if not isinstance(options, dict):
        raise invalid("stream_options must be an object", "stream_options")
    has_usage = _read_option(options, "include_usage")
    is_running = _read_option(options, "continuous_usage_stats")
    return Streaming(
        is_stream=True, has_usage_chunk=has_usage, has_running_usage=has_usage and is_running
    )


def _read_option(options: Values, name: str) -> bool:
    full_name = f"stream_options.{name}"
    return read_flag({full_name: options.get(name)}, full_name)
