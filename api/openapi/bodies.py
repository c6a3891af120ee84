"""The request bodies of every POST route, each with an example that works."""

from collections.abc import Mapping
from dataclasses import dataclass

from api.logprobs_parameters import MAX_COMPLETION_LOGPROBS
from api.openai.fields import HARMLESS_FIELDS
from api.openapi.fields import (
    COUNT,
    EFFORT,
    FLAG,
    IDS,
    JSON_SCHEMA,
    MESSAGES,
    NUM_LOGPROBS,
    OBJECT,
    SAMPLING,
    STOPS,
    TEMPERATURE,
    TEMPLATE,
    TEXT,
    TOOL_CHOICE,
    TOOLS,
    TOP_K,
    TOP_P,
    Json,
    described,
    either,
    many,
    record,
)

MODEL = "MODEL"  # in examples: the page puts the served one in its place
_HELLO = [{"role": "user", "content": "Why is the sky blue?"}]
_PROMPT = either(
    TEXT,
    many(TEXT, minItems=1),
    {**IDS, "minItems": 1},
    many(IDS, minItems=1),
)
_USER = described(TEXT, f"Ignored, as are {', '.join(sorted(HARMLESS_FIELDS - {'user'}))}")
_INPUT = either(TEXT, many(OBJECT, minItems=1))
_BLOCKS = either(TEXT, many(record({"type": TEXT, "text": TEXT}, "type"), minItems=1))
_COUNTED: Json = {
    "model": TEXT,
    "messages": many(
        record({"role": {"enum": ["user", "assistant"]}, "content": _BLOCKS}, "role", "content"),
        minItems=1,
    ),
    "system": _BLOCKS,
    "tools": many(record({"name": TEXT, "description": TEXT, "input_schema": OBJECT}, "name")),
    "tool_choice": record({"type": {"enum": ["auto", "any", "tool", "none"]}}, "type"),
    "thinking": described(
        record({"type": {"enum": ["enabled", "disabled", "adaptive"]}}, "type"),
        "Thoughts come only when asked for; enabled needs budget_tokens of at least 1024",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """What one route takes."""

    summary: str
    properties: Json
    required: tuple[str, ...]
    example: Json
    can_stream: bool = False


BODIES: Mapping[str, Body] = {
    "/v1/chat/completions": Body(
        summary="OpenAI: continue a chat",
        properties={
            "messages": MESSAGES,
            **SAMPLING,
            "tools": TOOLS,
            "tool_choice": TOOL_CHOICE,
            "parallel_tool_calls": {"type": "boolean", "default": True},
            "reasoning_effort": EFFORT,
            "chat_template_kwargs": TEMPLATE,
            "logprobs": FLAG,
            "top_logprobs": described(NUM_LOGPROBS, "Needs logprobs: true"),
            "user": _USER,
        },
        required=("model", "messages"),
        example={"model": MODEL, "messages": _HELLO, "max_tokens": 32, "stream": True},
        can_stream=True,
    ),
    "/v1/completions": Body(
        summary="OpenAI: continue one or several prompts",
        properties={
            "prompt": _PROMPT,
            **SAMPLING,
            "best_of": {"type": "integer", "minimum": 0, "maximum": 20},
            "logprobs": {**NUM_LOGPROBS, "maximum": MAX_COMPLETION_LOGPROBS},
            "echo": described(FLAG, "Puts the prompt before the text"),
            "user": _USER,
        },
        required=("model", "prompt"),
        example={"model": MODEL, "prompt": "Once upon a time", "max_tokens": 32},
        can_stream=True,
    ),
    "/v1/responses": Body(
        summary="OpenAI: the Responses API; nothing is kept between requests",
        properties={
            "model": TEXT,
            "input": described(_INPUT, "Text, or messages, reasoning, calls and their outputs"),
            "instructions": TEXT,
            "max_output_tokens": COUNT,
            "temperature": TEMPERATURE,
            "top_p": TOP_P,
            "tools": many(record({"type": {"const": "function"}, "name": TEXT}, "type", "name")),
            "tool_choice": TOOL_CHOICE,
            "parallel_tool_calls": {"type": "boolean", "default": True},
            "reasoning": record({"effort": EFFORT}),
            "text": record({"format": {**JSON_SCHEMA, "required": []}}),
            "prompt_cache_key": SAMPLING["prompt_cache_key"],
            "stream": FLAG,
            "stream_options": described(OBJECT, "Ignored"),
        },
        required=("model", "input"),
        example={"model": MODEL, "input": "Why is the sky blue?", "max_output_tokens": 32},
        can_stream=True,
    ),
    "/v1/messages": Body(
        summary="Anthropic: answer a chat",
        properties={
            **_COUNTED,
            "max_tokens": COUNT,
            "temperature": {**TEMPERATURE, "maximum": 1},
            "top_p": TOP_P,
            "top_k": TOP_K,
            "stop_sequences": STOPS,
            "output_config": record({"effort": EFFORT, "format": OBJECT}),
            "stream": FLAG,
        },
        required=("model", "max_tokens", "messages"),
        example={"model": MODEL, "max_tokens": 32, "messages": _HELLO},
        can_stream=True,
    ),
    "/v1/messages/count_tokens": Body(
        summary="Anthropic: length of a chat's prompt",
        properties=_COUNTED,
        required=("model", "messages"),
        example={"model": MODEL, "messages": _HELLO},
    ),
    "/tokenize": Body(
        summary="Turn a prompt or a chat into token ids",
        properties={
            "model": TEXT,
            "prompt": TEXT,
            "messages": MESSAGES,
            "tools": TOOLS,
            "tool_choice": TOOL_CHOICE,
            "parallel_tool_calls": {"type": "boolean", "default": True},
            "reasoning_effort": EFFORT,
            "chat_template_kwargs": TEMPLATE,
            "add_special_tokens": {"type": "boolean", "default": True},
            "return_token_strs": FLAG,
        },
        required=(),
        example={"model": MODEL, "messages": _HELLO},
    ),
    "/detokenize": Body(
        summary="Turn token ids into text",
        properties={"model": TEXT, "tokens": IDS},
        required=("tokens",),
        example={"model": MODEL, "tokens": [1, 2, 3]},
    ),
}
