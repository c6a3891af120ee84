"""Schemas of fields that several APIs share. The bounds are those the judgement has."""

from api.chat.conversation import EFFORTS, TEMPLATE_KWARGS
from api.chat.messages import MAX_MESSAGES
from api.chat.tools import MAX_TOOLS
from api.generation_request import MAX_CACHE_KEY_CHARACTERS, MAX_CACHE_SALT_CHARACTERS
from api.logprobs_parameters import MAX_LOGPROBS
from api.parameter_checks import MAX_STOP_CHARACTERS, MAX_STOPS
from api.structured_output import MAX_CHOICES
from api.token_parameters import MAX_BAD_WORDS, MAX_LOGIT_BIASES

Json = dict[str, object]

TEXT: Json = {"type": "string"}
FLAG: Json = {"type": "boolean", "default": False}
OBJECT: Json = {"type": "object"}
IDS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}}
COUNT: Json = {"type": "integer", "minimum": 1}
IGNORED: Json = {**TEXT, "description": "Ignored"}
NUM_LOGPROBS: Json = {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS}
_STOP: Json = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
STOPS: Json = {"type": "array", "items": _STOP, "minItems": 1, "maxItems": MAX_STOPS}
TEMPERATURE: Json = {"type": "number", "minimum": 0, "maximum": 2, "default": 1}
TOP_P: Json = {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "default": 1}
TOP_K: Json = {"type": "integer", "minimum": -1, "default": 0, "description": "0 or -1: off"}
EFFORT: Json = {"enum": list(EFFORTS), "description": "For templates that know it"}


def described(schema: Json, text: str) -> Json:
    """Return a schema with a word about it."""
    return {**schema, "description": text}


def record(properties: Json, *required: str) -> Json:
    """Return the schema of an object."""
    schema: Json = {"type": "object", "properties": properties}
    return {**schema, "required": list(required)} if required else schema


def many(items: Json, **bounds: object) -> Json:
    """Return the schema of a list."""
    return {"type": "array", "items": items, **bounds}


def either(*schemas: Json) -> Json:
    """Return the schema of what may be one or the other."""
    return {"anyOf": list(schemas)}


JSON_SCHEMA = record(
    {
        "name": {**TEXT, "pattern": "^[A-Za-z0-9_-]{1,64}$"},
        "schema": OBJECT,
        "strict": {"type": "boolean", "description": "Enforced either way"},
    },
    "name",
    "schema",
)
RESPONSE_FORMAT = record(
    {"type": {"enum": ["text", "json_object", "json_schema"]}, "json_schema": JSON_SCHEMA}, "type"
)
STRUCTURED_OUTPUTS = described(
    record(
        {
            "json": {"type": ["object", "string"], "description": "A JSON schema"},
            "regex": described(TEXT, "The whole text matches it"),
            "choice": many(TEXT, minItems=1, maxItems=MAX_CHOICES),
            "grammar": described(TEXT, "Lark or GBNF"),
            "json_object": FLAG,
        }
    ),
    "Exactly one of these",
)
FUNCTION = record({"name": TEXT, "description": TEXT, "parameters": OBJECT}, "name")
TOOLS = many(record({"type": {"const": "function"}, "function": FUNCTION}), maxItems=MAX_TOOLS)
TOOL_CHOICE = described(
    either({"enum": ["none", "auto", "required"]}, OBJECT),
    "Or one function by its name, or allowed_tools",
)
_PART = record({"type": {"const": "text"}, "text": TEXT}, "type", "text")
TEXT_OR_PARTS = either(TEXT, many(_PART, minItems=1))
MESSAGE = record(
    {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": TEXT_OR_PARTS,
        "name": TEXT,
        "tool_calls": many(OBJECT),
        "tool_call_id": TEXT,
        "reasoning_content": TEXT,
    },
    "role",
)
MESSAGES = many(MESSAGE, minItems=1, maxItems=MAX_MESSAGES)
TEMPLATE = described(
    record({name: either(TEXT, FLAG) for name in sorted(TEMPLATE_KWARGS)}),
    "What the chat template is told",
)

SAMPLING: Json = {
    "model": TEXT,
    "temperature": TEMPERATURE,
    "top_p": TOP_P,
    "top_k": TOP_K,
    "min_p": {"type": "number", "minimum": 0, "maximum": 1, "default": 0},
    "seed": {"type": "integer", "format": "int64", "description": "Default: random"},
    "n": {**COUNT, "maximum": 128, "default": 1, "description": "No more than can run together"},
    "max_tokens": COUNT,
    "max_completion_tokens": COUNT,
    "min_tokens": {"type": "integer", "minimum": 0, "default": 0},
    "stop": described(either(_STOP, STOPS), "Ends the text and is not part of it"),
    "stop_token_ids": IDS,
    "ignore_eos": FLAG,
    "include_stop_str_in_output": FLAG,
    "repetition_penalty": {"type": "number", "minimum": 0.01, "maximum": 100, "default": 1},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2, "default": 0},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2, "default": 0},
    "logit_bias": {
        "type": "object",
        "maxProperties": MAX_LOGIT_BIASES,
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "description": "Token id to a number that is added to its logit",
    },
    "bad_words": many(TEXT, maxItems=MAX_BAD_WORDS),
    "allowed_token_ids": {**IDS, "minItems": 1},
    "prompt_logprobs": described(NUM_LOGPROBS, "Candidates for each token of the prompt"),
    "return_token_ids": FLAG,
    "truncate_prompt_tokens": {
        "type": "integer",
        "minimum": -1,
        "description": "Keeps so many of the prompt's last tokens; -1: all that fit",
    },
    "cache_salt": {
        "type": "string",
        "minLength": 1,
        "maxLength": MAX_CACHE_SALT_CHARACTERS,
        "description": "Shares cached prompts only with the same salt",
    },
    "prompt_cache_key": {
        "type": "string",
        "maxLength": MAX_CACHE_KEY_CHARACTERS,
        "description": "A hint: requests with the same key probably share a prefix",
    },
    "priority": {"type": "integer", "default": 0, "description": "Lower is served earlier"},
    "response_format": RESPONSE_FORMAT,
    "structured_outputs": STRUCTURED_OUTPUTS,
    "stream": FLAG,
    "stream_options": record({"include_usage": FLAG, "continuous_usage_stats": FLAG}),
}
