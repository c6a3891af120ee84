"""Reads the messages of a chat: text only, roles the templates know."""

from collections.abc import Mapping

from api.errors import ApiError, Verdict, invalid, show

Message = dict[str, str]

MAX_MESSAGES = 2048
MAX_PARTS = 1024
MAX_NAME_CHARACTERS = 64
ROLES = frozenset({"system", "user", "assistant"})
# OpenAI's newer word for the same thing; templates know the older one only.
ROLE_ALIASES = {"developer": "system"}
UNSERVED_ROLES = frozenset({"tool", "function"})


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
    for field in ("tool_calls", "function_call", "audio"):
        if value.get(field):
            raise ApiError(
                Verdict.UNSUPPORTED, f"{name}.{field} is not served", param=f"{name}.{field}"
            )
    message = {
        "role": ROLE_ALIASES.get(role, role),
        "content": _read_content(value.get("content"), f"{name}.content"),
    }
    author = value.get("name")
    if author is not None:
        if not isinstance(author, str) or len(author) > MAX_NAME_CHARACTERS:
            raise invalid(
                f"{name}.name must be a string of at most {MAX_NAME_CHARACTERS} characters",
                f"{name}.name",
            )
        message["name"] = author
    return message


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
    text = value.get("text")
    if not isinstance(text, str):
        raise invalid(f"{name}.text must be a string, got {show(text)}", f"{name}.text")
    return text
