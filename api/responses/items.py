"""The items of an input as the messages of a chat."""

import itertools
from collections.abc import Iterable, Iterator, Mapping

from api.chat.messages import MAX_MESSAGES, MAX_PARTS
from api.errors import ApiError, Verdict, invalid, show

Message = dict[str, object]

_TEXT_KINDS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})


def read_input(value: object, instructions: object) -> list[Message]:
    """Return a chat's messages; what an assistant thought, said and called is one of them."""
    messages: list[Message] = []
    if instructions is not None:
        messages.append({"role": "system", "content": _string(instructions, "instructions")})
    if isinstance(value, str):
        return [*messages, {"role": "user", "content": value}]
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        raise invalid(f"input must be a string or a list of 1 to {MAX_MESSAGES} items", "input")
    for index, item in enumerate(value):
        _add(item, messages, f"input[{index}]")
    return list(_joined(messages))


def _add(item: object, messages: list[Message], name: str) -> None:
    if not isinstance(item, dict):
        raise invalid(f"{name} must be an object, got {show(item)}", name)
    match item.get("type", "message"):
        case "message":
            content = _content(item.get("content"), f"{name}.content")
            if item.get("role") == "assistant" and _is_silent(messages):
                _answer(messages)["content"] = content
            else:
                messages.append({"role": item.get("role"), "content": content})
        case "reasoning":
            parts = item.get("content") or item.get("summary") or ""
            _answer(messages)["reasoning_content"] = _content(parts, f"{name}.content")
        case "function_call":
            calls = _answer(messages).setdefault("tool_calls", [])
            assert isinstance(calls, list)
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
        case "function_call_output":
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": item.get("call_id"),
                    "content": _content(item.get("output"), f"{name}.output"),
                }
            )
        case kind:
            raise ApiError(
                Verdict.UNSUPPORTED,
                f"{name}.type = {show(kind)} is not served; use messages, reasoning and functions",
                param=f"{name}.type",
            )


def _joined(messages: Iterable[Message]) -> Iterator[Message]:
    """Make neighbouring instructions one: many templates know one system message only."""
    for is_instruction, neighbours in itertools.groupby(messages, _is_instruction):
        if is_instruction:
            texts = "\n\n".join(str(message["content"]) for message in neighbours)
            yield {"role": "system", "content": texts}
        else:
            yield from neighbours


def _is_instruction(message: Message) -> bool:
    return message["role"] in ("system", "developer")  # no set: anything may stand there


def _is_silent(messages: list[Message]) -> bool:
    """Tell whether the chat ends with a thought of the assistant, which its words belong to."""
    return bool(messages) and messages[-1].keys() == {"role", "content", "reasoning_content"}


def _answer(messages: list[Message]) -> Message:
    """The assistant's message at the end of the chat; a new one after anybody else's."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _content(value: object, name: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_PARTS:
        raise invalid(f"{name} must be a string or a list of 1 to {MAX_PARTS} parts", name)
    return "\n".join(_text(part, f"{name}[{index}]") for index, part in enumerate(value))


def _text(part: object, name: str) -> str:
    if not isinstance(part, Mapping):
        raise invalid(f"{name} must be an object, got {show(part)}", name)
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXT_KINDS:
        raise ApiError(
            Verdict.UNSUPPORTED,
            f"{name}.type must be 'input_text', got {show(kind)}; only text is served",
            param=f"{name}.type",
        )
    return _string(part.get("text"), f"{name}.text")


def _string(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise invalid(f"{name} must be a string, got {show(value)}", name)
    return value
