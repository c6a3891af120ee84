"""Anthropic's messages as those of a chat: blocks become texts, calls and results of tools."""

import itertools
from collections.abc import Iterable, Iterator, Mapping

import orjson

from api.chat.messages import MAX_MESSAGES, MAX_PARTS
from api.errors import ApiError, Verdict, invalid, show

Message = dict[str, object]


def read_system(value: object) -> list[Message]:
    """Return the system message, if there is one."""
    if value is None or value in ("", []):
        return []
    return [{"role": "system", "content": "\n".join(_texts(value, "system"))}]


def read_messages(value: object) -> list[Message]:
    """Return a chat's messages; neighbours of one role are one turn."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        raise invalid(f"messages must be a list of 1 to {MAX_MESSAGES} messages", "messages")
    turns = (
        turn
        for index, message in enumerate(value)
        for turn in _read_message(message, f"messages[{index}]")
    )
    messages = list(_joined(turns))
    if messages[-1]["role"] == "assistant":
        raise ApiError(
            Verdict.UNSUPPORTED,
            "The last message must be the user's: beginning the assistant's answer is not served",
            param="messages",
        )
    return messages


def _joined(turns: Iterable[Message]) -> Iterator[Message]:
    """Make neighbours of one role one turn, if they do nothing but speak."""
    for (role, is_plain), neighbours in itertools.groupby(turns, _role_and_kind):
        if is_plain:
            yield {"role": role, "content": "\n".join(str(turn["content"]) for turn in neighbours)}
        else:
            yield from neighbours


def _role_and_kind(turn: Message) -> tuple[object, bool]:
    return turn["role"], turn.keys() == {"role", "content"}


def _read_message(value: object, name: str) -> Iterable[Message]:
    if not isinstance(value, dict):
        raise invalid(f"{name} must be an object, got {show(value)}", name)
    role, place = value.get("role"), f"{name}.content"
    if role not in ("user", "assistant"):  # no set: anything may stand there
        raise invalid(f"{name}.role must be user or assistant, got {show(role)}", f"{name}.role")
    given = value.get("content")
    if isinstance(given, str):
        return [{"role": role, "content": given}]
    blocks = _blocks(given, place)
    return _read_user(blocks, place) if role == "user" else [_read_assistant(blocks, place)]


def _read_user(blocks: list[Mapping[str, object]], name: str) -> list[Message]:
    messages: list[Message] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        place = f"{name}[{index}]"
        if block.get("type") == "tool_result":
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": block.get("tool_use_id"),
                    "content": "\n".join(_texts(block.get("content") or "", f"{place}.content")),
                }
            )
        else:
            texts.append(_text(block, place))
    if texts or not messages:
        messages.append({"role": "user", "content": "\n".join(texts)})
    return messages


def _read_assistant(blocks: list[Mapping[str, object]], name: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[object] = []
    for index, block in enumerate(blocks):
        place = f"{name}[{index}]"
        match block.get("type"):
            case "thinking":
                thoughts.append(_string(block.get("thinking"), f"{place}.thinking"))
            case "redacted_thinking":
                pass  # nobody's words but the other server's
            case "tool_use":
                calls.append(_call(block, place))
            case _:
                texts.append(_text(block, place))
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def _call(block: Mapping[str, object], place: str) -> Message:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise invalid(f"{place}.input must be an object, got {show(arguments)}", f"{place}.input")
    function = {"name": block.get("name"), "arguments": orjson.dumps(arguments).decode()}
    return {"id": block.get("id"), "type": "function", "function": function}


def _texts(value: object, name: str) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [_text(block, f"{name}[{index}]") for index, block in enumerate(_blocks(value, name))]


def _blocks(value: object, name: str) -> list[Mapping[str, object]]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_PARTS:
        raise invalid(f"{name} must be a string or a list of 1 to {MAX_PARTS} blocks", name)
    for index, block in enumerate(value):
        if not isinstance(block, dict):
            raise invalid(f"{name}[{index}] must be an object, got {show(block)}", name)
    return value


def _text(block: Mapping[str, object], place: str) -> str:
    kind = block.get("type")
    if kind != "text":
        raise ApiError(
            Verdict.UNSUPPORTED,
            f"{place}.type must be 'text' or a tool's block, got {show(kind)}; only text is served",
            param=f"{place}.type",
        )
    return _string(block.get("text"), f"{place}.text")


def _string(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise invalid(f"{name} must be a string, got {show(value)}", name)
    return value
