"""The OpenAPI document of the HTTP server and the page that shows it, both without any network."""

import importlib.resources

from api.logprobs_parameters import MAX_COMPLETION_LOGPROBS, MAX_LOGPROBS
from api.openai.fields import HARMLESS_FIELDS
from api.parameter_checks import MAX_STOP_CHARACTERS, MAX_STOPS
from api.request_timeout import TIMEOUT_HEADER
from api.structured_output import MAX_CHOICES
from api.token_parameters import MAX_BAD_WORDS, MAX_LOGIT_BIASES

Json = dict[str, object]

_TEXT: Json = {"type": "string"}
_FLAG: Json = {"type": "boolean", "default": False}
_IDS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_STOP: Json = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_COUNT: Json = {"type": "integer", "minimum": 1}

_TIMEOUT: Json = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "required": False,
    "schema": {"type": "number", "exclusiveMinimum": 0},
    "description": "Seconds from arrival to the end; the server's own limit where it is shorter",
}
_NUM_LOGPROBS: Json = {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS}
_RESPONSE_FORMAT: Json = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "json_schema": {
            "type": "object",
            "required": ["name", "schema"],
            "properties": {
                "name": {**_TEXT, "pattern": "^[A-Za-z0-9_-]{1,64}$"},
                "schema": {"type": "object"},
                "strict": {"type": "boolean", "description": "Enforced either way"},
            },
        },
    },
}
_STRUCTURED_OUTPUTS: Json = {
    "type": "object",
    "description": "Exactly one of these",
    "properties": {
        "json": {"type": ["object", "string"], "description": "A JSON schema"},
        "regex": {**_TEXT, "description": "The whole text matches it"},
        "choice": {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_CHOICES},
        "grammar": {**_TEXT, "description": "Lark or GBNF"},
        "json_object": _FLAG,
    },
}

_SAMPLING: Json = {
    "model": _TEXT,
    "temperature": {"type": "number", "minimum": 0, "maximum": 2, "default": 1},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "default": 1},
    "top_k": {"type": "integer", "minimum": -1, "default": 0, "description": "0 or -1: off"},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1, "default": 0},
    "seed": {"type": "integer", "format": "int64", "description": "Default: random"},
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "min_tokens": {"type": "integer", "minimum": 0, "default": 0},
    "stop": {
        "oneOf": [_STOP, {"type": "array", "items": _STOP, "minItems": 1, "maxItems": MAX_STOPS}],
        "description": "Ends the text and is not part of it",
    },
    "stop_token_ids": _IDS,
    "ignore_eos": _FLAG,
    "include_stop_str_in_output": _FLAG,
    "repetition_penalty": {"type": "number", "minimum": 0.01, "maximum": 100, "default": 1},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2, "default": 0},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2, "default": 0},
    "logit_bias": {
        "type": "object",
        "maxProperties": MAX_LOGIT_BIASES,
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "description": "Token id to a number that is added to its logit",
    },
    "bad_words": {"type": "array", "items": _TEXT, "maxItems": MAX_BAD_WORDS},
    "allowed_token_ids": {**_IDS, "minItems": 1},
    "prompt_logprobs": {**_NUM_LOGPROBS, "description": "Candidates for each token of the prompt"},
    "return_token_ids": _FLAG,
    "cache_salt": {**_TEXT, "description": "Shares cached prompts only with the same salt"},
    "response_format": _RESPONSE_FORMAT,
    "structured_outputs": _STRUCTURED_OUTPUTS,
    "stream": _FLAG,
    "stream_options": {"type": "object", "properties": {"include_usage": _FLAG}},
    "user": {
        **_TEXT,
        "description": f"Ignored, as are {', '.join(sorted(HARMLESS_FIELDS - {'user'}))}",
    },
}
_MESSAGE: Json = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {
            "oneOf": [
                _TEXT,
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": _TEXT},
                    },
                },
            ]
        },
        "name": _TEXT,
    },
}
_MESSAGES: Json = {"type": "array", "minItems": 1, "items": _MESSAGE}
_PROMPT: Json = {
    "oneOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1},
        {**_IDS, "minItems": 1},
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}
_ERROR: Json = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": _TEXT,
            },
        },
        "request_id": _TEXT,
    },
}


def openapi_document(version: str) -> Json:
    """Return the description of every route."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Relevo", "version": version},
        "paths": {
            "/v1/chat/completions": _post(
                "Continue a chat; streams server-sent events with stream: true",
                {
                    "messages": _MESSAGES,
                    **_SAMPLING,
                    "logprobs": _FLAG,
                    "top_logprobs": {**_NUM_LOGPROBS, "description": "Needs logprobs: true"},
                },
                _TIMEOUT,
                required=["model", "messages"],
            ),
            "/v1/completions": _post(
                "Continue one or several prompts",
                {
                    "prompt": _PROMPT,
                    **_SAMPLING,
                    "logprobs": {**_NUM_LOGPROBS, "maximum": MAX_COMPLETION_LOGPROBS},
                    "echo": {**_FLAG, "description": "Puts the prompt before the text"},
                },
                _TIMEOUT,
                required=["model", "prompt"],
            ),
            "/tokenize": _post(
                "Turn a prompt or a chat into token ids",
                {"model": _TEXT, "prompt": _TEXT, "messages": _MESSAGES},
            ),
            "/detokenize": _post(
                "Turn token ids into text", {"model": _TEXT, "tokens": _IDS}, required=["tokens"]
            ),
            "/v1/models": _get("List the served model"),
            "/v1/models/{model}": _get("Describe the served model", _parameter("model", "path")),
            "/v1/status": _get("State of the cluster", _parameter("routes", "query")),
            "/v1/loads": _get("Load of every live worker"),
            "/health": _get("This process answers", is_open=True),
            "/ready": _get("A request sent now would be served", is_open=True),
            "/version": _get("Version of the server"),
            "/metrics": _get("Prometheus page of this ingress and all workers"),
            "/openapi.json": _get("This document"),
            "/docs": _get("This document as a page"),
        },
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def docs_page(document: bytes) -> str:
    """Return one self-contained page with the document inside."""
    page = importlib.resources.files("api").joinpath("static/docs.html").read_text()
    return page.replace("__OPENAPI__", document.decode().replace("<", "\\u003c"))


def _post(
    summary: str, properties: Json, *parameters: Json, required: list[str] | None = None
) -> Json:
    schema: Json = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    operation: Json = {"summary": summary, "requestBody": body, "responses": _responses()}
    if parameters:
        operation["parameters"] = list(parameters)
    return {"post": operation}


def _get(summary: str, *parameters: Json, is_open: bool = False) -> Json:
    operation: Json = {"summary": summary, "responses": _responses()}
    if parameters:
        operation["parameters"] = list(parameters)
    if is_open:
        operation["security"] = []
    return {"get": operation}


def _parameter(name: str, place: str) -> Json:
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}


def _responses() -> Json:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "200": {"description": "Success"},
        "default": {"description": "An error, in OpenAI's form", "content": content},
    }
