"""Turns the body of a Messages request into a chat's, which is then judged like any other."""

from collections.abc import Mapping

from api.anthropic.fields import NAMES, check_fields
from api.anthropic.messages import read_messages, read_system
from api.call import Call, Streaming
from api.chat.conversation import read_conversation
from api.chat.request import read_chat_request
from api.errors import ApiError, Verdict, invalid, renamed, show
from api.generation_request import read_model
from api.parameter_checks import Values, read_flag, read_number
from api.serving import Serving
from telemetry import attributes

MIN_THINKING_TOKENS = 1024
_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k")


async def read_messages_call(body: Values, serving: Serving) -> Call:
    """Read the body of /v1/messages."""
    read_model(body, served_model=serving.model_config.model_id)
    unknown = check_fields(body, is_strict=serving.config.strict)
    if body.get("max_tokens") is None:
        raise invalid("max_tokens is required", "max_tokens")
    read_number(body, "temperature", default=1.0, low=0, high=1)
    values = {name: body.get(name) for name in _SAME} | _chat(body)
    if body.get("stop_sequences"):
        values["stop"] = body["stop_sequences"]
    values |= _output(body.get("output_config"))
    try:
        request = await read_chat_request(values, serving)
    except ApiError as error:
        raise renamed(error, NAMES) from error
    return Call(
        operation=attributes.OPERATION_CHAT,
        requests=[request],
        streaming=Streaming(is_stream=read_flag(body, "stream")),
        unknown_fields=unknown,
        echoed={"thinking": is_thinking(body)},
    )


async def count_tokens(body: Values, serving: Serving) -> tuple[int, list[str]]:
    """Return how many tokens the prompt of a Messages request has, and its unknown fields."""
    read_model(body, served_model=serving.model_config.model_id)
    unknown = check_fields(body, is_strict=serving.config.strict)
    try:
        chat = read_conversation(_chat(body))
        prompt = await serving.tokenizer.encode_chat(
            chat, max_model_len=serving.limits().max_model_len
        )
    except ApiError as error:
        raise renamed(error, NAMES) from error
    return len(prompt.token_ids), unknown


def is_thinking(body: Values) -> bool:
    """Tell whether the client wants thoughts, and to see them."""
    thinking = body.get("thinking")
    if thinking is None:
        return False
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if not isinstance(thinking, dict) or kind not in ("enabled", "disabled", "adaptive"):
        raise invalid(
            f"thinking.type must be enabled, disabled or adaptive, got {show(kind)}",
            "thinking.type",
        )
    budget = thinking.get("budget_tokens")
    has_budget = type(budget) is int and budget >= MIN_THINKING_TOKENS
    if kind == "enabled" and not has_budget:
        raise invalid(
            f"thinking.budget_tokens must be an integer of at least {MIN_THINKING_TOKENS}, "
            f"got {show(budget)}",
            "thinking.budget_tokens",
        )
    return bool(kind != "disabled")


def _chat(body: Values) -> dict[str, object]:
    """Return what makes the prompt, by OpenAI's names."""
    messages = [*read_system(body.get("system")), *read_messages(body.get("messages"))]
    values: dict[str, object] = {
        "messages": messages,
        "chat_template_kwargs": {"enable_thinking": is_thinking(body)},
    }
    tools = body.get("tools")
    if tools:
        if not isinstance(tools, list):
            raise invalid(f"tools must be a list, got {show(tools)}", "tools")
        values["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if body.get("tool_choice") is not None:
        values |= _tool_choice(body["tool_choice"])
    return values


def _tool(value: object, place: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise invalid(f"{place} must be an object, got {show(value)}", place)
    kind = value.get("type")
    if kind not in (None, "custom"):
        raise ApiError(
            Verdict.UNSUPPORTED,
            f"{place}.type must be 'custom', got {show(kind)}; tools of the server are not served",
            param=f"{place}.type",
        )
    function = {"name": value.get("name"), "parameters": value.get("input_schema")}
    return {"type": "function", "function": {**function, "description": value.get("description")}}


def _tool_choice(value: object) -> dict[str, object]:
    choice = value if isinstance(value, dict) else {}
    named = {"type": "function", "function": {"name": choice.get("name")}}
    choices: Mapping[object, object] = {
        "auto": "auto",
        "any": "required",
        "none": "none",
        "tool": named,
    }
    kind = choice.get("type")
    if not isinstance(kind, str) or kind not in choices:
        raise invalid(
            f"tool_choice.type must be auto, any, tool or none, got {show(kind)}",
            "tool_choice.type",
        )
    name = "tool_choice.disable_parallel_tool_use"
    is_single = read_flag({name: choice.get("disable_parallel_tool_use")}, name)
    return {"tool_choice": choices[kind], "parallel_tool_calls": not is_single}


def _output(value: object) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid(f"output_config must be an object, got {show(value)}", "output_config")
    values: dict[str, object] = {}
    if value.get("effort") is not None:
        values["reasoning_effort"] = value["effort"]
    format_ = value.get("format")
    if format_ is not None:
        kind = format_.get("type") if isinstance(format_, dict) else None
        if not isinstance(format_, dict) or kind != "json_schema":
            raise invalid(
                f"output_config.format.type must be json_schema, got {show(kind)}",
                "output_config.format.type",
            )
        schema = {"name": "output", "schema": format_.get("schema")}
        values["response_format"] = {"type": "json_schema", "json_schema": schema}
    return values
