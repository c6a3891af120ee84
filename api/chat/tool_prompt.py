"""Tools for models whose template knows none: shown and answered in Hermes' words.

How good a model is at it is the model's own affair; an enforced call is right in form with any.
"""

from collections.abc import Sequence

import orjson

from api.chat.messages import Message
from api.chat.tools import Tool

_HEAD = """You may call functions. Each line here describes one:
<tools>
"""
_TAIL = """
</tools>
To call one, write a JSON object with its name and arguments inside tool_call tags:
<tool_call>
{"name": "...", "arguments": {...}}
</tool_call>"""


def with_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Put the tools into the system message, and calls and results into plain ones."""
    plain: list[Message] = []
    for message in messages:
        is_next_result = message["role"] == "tool" and bool(plain) and plain[-1].get("is_result")
        if is_next_result:  # many templates want users and assistants to take turns
            plain[-1]["content"] = f"{plain[-1]['content']}\n{_plain(message)['content']}"
        else:
            plain.append(_plain(message))
    plain = [{key: each for key, each in turn.items() if key != "is_result"} for turn in plain]
    if not tools:
        return plain
    lines = [orjson.dumps(tool["function"]).decode() for tool in tools]
    prompt = _HEAD + "\n".join(lines) + _TAIL
    if plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{prompt}"}, *plain[1:]]
    return [{"role": "system", "content": prompt}, *plain]


def _plain(message: Message) -> Message:
    if message["role"] == "tool":
        return {
            "role": "user",
            "is_result": True,
            "content": f"<tool_response>\n{message['content']}\n</tool_response>",
        }
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    texts = [
        f"<tool_call>\n{orjson.dumps(call['function']).decode()}\n</tool_call>" for call in calls
    ]
    content = "\n".join([*([str(message["content"])] if message["content"] else []), *texts])
    return {"role": "assistant", "content": content}
