"""The answers of every POST route."""

from api.openapi.fields import OBJECT, TEXT, Json, described, many, record

_SECONDS: Json = {"type": "number", "minimum": 0}
_TOKENS: Json = {"type": "integer", "minimum": 0}

TIMES: Json = {
    "queue_time": described(_SECONDS, "Waiting and routing, in seconds; in no sum"),
    "prompt_time": described(_SECONDS, "From routing to the first token"),
    "completion_time": described(_SECONDS, "From the first token to the last"),
    "total_time": described(_SECONDS, "prompt_time + completion_time"),
    "kv_transfer_time": described(_SECONDS, "Hand-over; overlaps the others, in no sum"),
}
_USAGE = record(
    {
        "prompt_tokens": _TOKENS,
        "completion_tokens": _TOKENS,
        "total_tokens": _TOKENS,
        "prompt_tokens_details": record({"cached_tokens": _TOKENS}),
        "completion_tokens_details": record({"reasoning_tokens": _TOKENS}),
        **TIMES,
    },
    *("prompt_tokens", "completion_tokens", "total_tokens", *TIMES),
)
_NAME: Json = {"type": ["string", "null"]}
X_RELEVO = record(
    {
        "request_id": TEXT,
        "prefill_worker": described(_NAME, "Null: the decode worker alone"),
        "decode_worker": _NAME,
        "cached_tokens": record({"prefill": _TOKENS, "decode": _TOKENS}, "prefill", "decode"),
        "kv_transfer_bytes": _TOKENS,
    },
    *("request_id", "prefill_worker", "decode_worker", "cached_tokens", "kv_transfer_bytes"),
)


def _text_answer(kind: str) -> Json:
    return record(
        {
            "id": TEXT,
            "object": {"const": kind},
            "created": _TOKENS,
            "model": TEXT,
            "choices": many(record({"index": _TOKENS, "finish_reason": TEXT}, "index")),
            "usage": _USAGE,
            "x_relevo": X_RELEVO,
        },
        *("id", "object", "created", "model", "choices", "usage", "x_relevo"),
    )


ANSWERS: dict[str, Json] = {
    "/v1/chat/completions": _text_answer("chat.completion"),
    "/v1/completions": _text_answer("text_completion"),
    "/v1/responses": record(
        {
            "id": TEXT,
            "object": {"const": "response"},
            "status": {"enum": ["completed", "incomplete"]},
            "model": TEXT,
            "output": many(OBJECT),
            "usage": record({"input_tokens": _TOKENS, "output_tokens": _TOKENS, **TIMES}),
            "x_relevo": X_RELEVO,
        },
        *("id", "object", "status", "model", "output", "usage", "x_relevo"),
    ),
    "/v1/messages": record(
        {
            "id": TEXT,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": TEXT,
            "content": many(OBJECT),
            "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            "stop_sequence": _NAME,
            "usage": record({"input_tokens": _TOKENS, "output_tokens": _TOKENS, **TIMES}),
            "x_relevo": X_RELEVO,
        },
        *("id", "type", "role", "model", "content", "stop_reason", "usage", "x_relevo"),
    ),
    "/v1/messages/count_tokens": record({"input_tokens": _TOKENS}, "input_tokens"),
    "/tokenize": record(
        {"count": _TOKENS, "max_model_len": _TOKENS, "tokens": many(_TOKENS)}, "count", "tokens"
    ),
    "/detokenize": record({"prompt": TEXT}, "prompt"),
}

EVENT = record({"event": TEXT, "data": described(TEXT, "JSON, or [DONE]")}, "data")
ERROR = record(
    {
        "error": record(
            {
                "message": described(TEXT, "What was wrong, where, and what to change"),
                "type": TEXT,
                "param": described(_NAME, "The field to blame, if one is"),
                "code": TEXT,
            },
            *("message", "type", "param", "code"),
        ),
        "request_id": TEXT,
    },
    "error",
)
ANTHROPIC_ERROR = record(
    {
        "type": {"const": "error"},
        "error": record({"type": TEXT, "message": TEXT}, "type", "message"),
        "request_id": TEXT,
    },
    *("type", "error", "request_id"),
)
