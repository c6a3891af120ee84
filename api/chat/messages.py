"""Reads the messages of a chat: text, tool calls and their results, roles the templates know."""

from collections.abc import Mapping

import orjson

from api.errors import ApiError, Verdict, invalid, show

# As templates take it: role, content and what a tool's part in the chat needs.
Message = dict[str, object]

MAX_MESSAGES = 2048
MAX_PARTS = 1024
MAX_NAME_CHARACTERS = 64
MAX_CALLS = 128  # of one message
ROLES = frozenset({"system", "user", "assistant", "tool"})
# OpenAI's newer word for the same thing; templates know the older one only.
ROLE_ALIASES = {"developer": "system"}
UNSERVED_ROLES = frozenset({"function"})


def read_messages(value: object) -> list[Message]:
    """Return role and text of each message; ApiError names the one that is wrong."""
    if value is None:
        raise invalid("messages is required", "messages")
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        raise invalid(f"messages must be a list of 1 to {MAX_MESSAGES} messages", "messages")
    return [_read_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _read_message(value: object, name: str) -> Message:
    if not isinstance(value, dict):
        raise invalid(f"{name} must be an object, got {show(value)}", name)
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES | UNSERVED_ROLES | ROLE_ALIASES.keys():
        expected = ", ".join(sorted(ROLES | ROLE_ALIASES.keys()))
        raise invalid(f"{name}.role must be one of {expected}, got {show(role)}", f"{name}.role")
    if role in UNSERVED_ROLES:
        raise ApiError(
            Verdict.UNSUPPORTED, f"{name}.role {role!r} is not served", param=f"{name}.role"
        )
    for field in ("function_call", "audio"):
        if value.get(field):
            raise ApiError(
                Verdict.UNSUPPORTED, f"{name}.{field} is not served", param=f"{name}.{field}"
            )
    message: Message = {"role": ROLE_ALIASES.get(role, role)}
    if role == "assistant":
        message |= _read_answer(value, name)
    given = value.get("content")
    # A message that calls, or thinks, may say nothing.
    is_silent = len(message) > 1 and given in (None, [])
    message["content"] = "" if is_silent else _read_content(given, f"{name}.content")
    if role == "tool":
        message["tool_call_id"] = _read_id(value.get("tool_call_id"), f"{name}.tool_call_id")
    if value.get("name") is not None:
        message["name"] = _read_name(value["name"], f"{name}.name")
    return message


def _read_answer(value: Mapping[str, object], name: str) -> Message:
    """Read what the assistant did beside speaking."""
    answer: Message = {}
    if calls := _read_calls(value.get("tool_calls"), f"{name}.tool_calls"):
        answer["tool_calls"] = calls
    if thoughts := value.get("reasoning_content"):
        answer["reasoning_content"] = _string(thoughts, f"{name}.reasoning_content")
    return answer


def _read_calls(value: object, name: str) -> list[dict[str, object]]:
    """Read what the assistant called earlier; templates take the arguments as an object."""
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MAX_CALLS:
        raise invalid(f"{name} must be a list of at most {MAX_CALLS} calls", name)
    calls: list[dict[str, object]] = []
    for index, call in enumerate(value):
        place = f"{name}[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict):
            raise invalid(f"{place} must be an object with a function, got {show(call)}", place)
        arguments = _string(function.get("arguments"), f"{place}.function.arguments")
        calls.append(
            {
                "id": _read_id(call.get("id"), f"{place}.id"),
                "type": "function",
                "function": {
                    "name": _read_name(function.get("name"), f"{place}.function.name"),
                    "arguments": _loaded(arguments),
                },
            }
        )
    return calls


def _loaded(arguments: str) -> object:
    """A model's own words may be no JSON; then they stand in the chat as they are."""
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _read_id(value: object, name: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME_CHARACTERS:
        raise invalid(
            f"{name} must be a string of 1 to {MAX_NAME_CHARACTERS} characters, got {show(value)}",
            name,
        )
    return value


def _read_name(value: object, name: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARACTERS:
        raise invalid(f"{name} must be a string of at most {MAX_NAME_CHARACTERS} characters", name)
    return value


def _string(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise invalid(f"{name} must be a string, got {show(value)}", name)
    return value


def _read_content(value: object, name: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_PARTS:
        raise invalid(f"{name} must be a string or a list of 1 to {MAX_PARTS} parts", name)
    return "\n".join(_read_part(part, f"{name}[{index}]") for index, part in enumerate(value))


def _read_part(value: object, name: str) -> str:
    if not isinstance(value, Mapping):
        raise invalid(f"{name} must be an object, got {show(value)}", name)
    kind = value.get("type")
    if kind != "text":
        raise ApiError(
            Verdict.UNSUPPORTED,
            f"{name}.type must be 'text', got {show(kind)}; only text is served",
            param=f"{name}.type",
        )
    return _string(value.get("text"), f"{name}.text")


def num_characters(value: object) -> int:
    """Length of all text in messages or tools: what it costs to render and tokenise them."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(num_characters(key) + num_characters(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return sum(num_characters(each) for each in value)
    return 8
