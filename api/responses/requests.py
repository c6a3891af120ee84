"""Turns the body of a Responses request into a chat's, which is then judged like any other."""

from collections.abc import Mapping

from api.call import Call, Streaming
from api.chat.request import read_chat_request
from api.errors import ApiError, Verdict, invalid, renamed, show
from api.generation_request import read_model
from api.parameter_checks import Values, read_flag
from api.responses.fields import NAMES, SAME_FIELDS, check_fields
from api.responses.items import read_input
from api.serving import Serving
from telemetry import attributes


async def read_response_call(body: Values, serving: Serving) -> Call:
    """Read the body of /v1/responses."""
    read_model(body, served_model=serving.model_config.model_id)
    unknown = check_fields(body, is_strict=serving.config.strict)
    values: dict[str, object] = {name: body.get(name) for name in SAME_FIELDS}
    values["max_completion_tokens"] = body.get("max_output_tokens")
    values["messages"] = read_input(body.get("input"), body.get("instructions"))
    values |= _tools(body) | _reasoning(body.get("reasoning")) | _text(body.get("text"))
    try:
        request = await read_chat_request(values, serving, prompt_name="input")
    except ApiError as error:
        raise renamed(error, NAMES) from error
    return Call(
        operation=attributes.OPERATION_CHAT,
        requests=[request],
        streaming=Streaming(is_stream=read_flag(body, "stream")),
        unknown_fields=unknown,
        echoed=_echoed(body),
    )


def _tools(body: Values) -> dict[str, object]:
    values: dict[str, object] = {}
    tools = body.get("tools")
    if tools:
        if not isinstance(tools, list):
            raise invalid(f"tools must be a list, got {show(tools)}", "tools")
        values["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        choice = _tool_choice(choice)
    return values if choice is None else {**values, "tool_choice": choice}


def _tool(value: object, place: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise invalid(f"{place} must be an object, got {show(value)}", place)
    kind = value.get("type")
    if kind != "function":
        raise ApiError(
            Verdict.UNSUPPORTED,
            f"{place}.type must be 'function', got {show(kind)}; no other tool is served",
            param=f"{place}.type",
        )
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: value.get(name) for name in names}}


def _tool_choice(choice: Mapping[str, object]) -> dict[str, object]:
    """Functions are named without a level in between here."""
    match choice.get("type"):
        case "function":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case "allowed_tools":
            tools = choice.get("tools")
            named = [
                {"function": {"name": tool.get("name")}} if isinstance(tool, dict) else tool
                for tool in (tools if isinstance(tools, list) else [])
            ]
            allowed = {"mode": choice.get("mode", "auto"), "tools": named}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    return dict(choice)


def _reasoning(value: object) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid(f"reasoning must be an object, got {show(value)}", "reasoning")
    return {"reasoning_effort": value.get("effort")}


def _text(value: object) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid(f"text must be an object, got {show(value)}", "text")
    format_ = value.get("format")
    if format_ is None:
        return {}
    if not isinstance(format_, dict):
        raise invalid(f"text.format must be an object, got {show(format_)}", "text.format")
    kind = format_.get("type")
    if kind != "json_schema":
        return {"response_format": {"type": kind}}
    schema = {name: format_.get(name) for name in ("name", "schema", "strict")}
    return {"response_format": {"type": kind, "json_schema": schema}}


def _echoed(body: Values) -> dict[str, object]:
    """What an answer repeats of its request, with what holds where nothing was said."""
    reasoning = body.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    text = body.get("text")
    format_ = text.get("format") if isinstance(text, dict) else None
    defaults: dict[str, object] = {
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "prompt_cache_key": None,
        "safety_identifier": None,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "user": None,
    }
    told = {name: body[name] for name in defaults if body.get(name) is not None}
    return {
        **defaults,
        **told,
        "background": False,
        "max_tool_calls": None,
        "previous_response_id": None,
        "reasoning": {"effort": effort, "summary": None},
        "service_tier": "default",
        "store": False,
        "text": {"format": format_ or {"type": "text"}},
        "top_logprobs": 0,
        "truncation": "disabled",
    }
