"""What a grammar of tools lets through, and what templates are shown."""

from typing import Any

import llguidance
import pytest

from api.chat.tools import Choice, ToolUse, read_tool_use
from api.errors import ApiError
from grammar.compiler import _to_library

# It refers to itself, as a whole and in part.
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "v": {"type": "integer"},
        "kids": {"type": "array", "items": {"$ref": "#"}},
        "p": {"$ref": "#/$defs/P"},
    },
    "required": ["v"],
    "additionalProperties": False,
    "$defs": {"P": {"type": "object", "properties": {"q": {"$ref": "#/$defs/P"}}}},
}
TOOLS = [
    {"type": "function", "function": {"name": "a", "parameters": TREE}},
    {"type": "function", "function": {"name": "b", "description": "takes nothing"}},
]
A = '{"name":"a","arguments":{"v":1,"kids":[{"v":2}],"p":{"q":{}}}}'
B = '{"name":"b","arguments":{}}'


def accepts(use: ToolUse, text: str) -> bool:
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, _to_library(use.grammar().grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_a_required_call_is_a_list_of_right_calls() -> None:
    use = read_tool_use({"tools": TOOLS, "tool_choice": "required"})
    assert accepts(use, f"[{A},{B}]")
    for text in ("[]", "hello", '[{"name":"c","arguments":{}}]', '[{"name":"a","arguments":{}}]'):
        assert not accepts(use, text)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "function", "function": {"name": "b"}}},
        {"tool_choice": "required", "parallel_tool_calls": False},
    ],
    ids=repr,
)
def test_one_call_is_one(fields: dict[str, Any]) -> None:
    use = read_tool_use({"tools": TOOLS, **fields})
    assert accepts(use, f"[{B}]")
    assert not accepts(use, f"[{B},{B}]")


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    assert read_tool_use({"tools": TOOLS, "tool_choice": "none"}).tools == ()
    use = read_tool_use({"tools": TOOLS})
    assert (use.choice, use.names) == (Choice.AUTO, ("a", "b"))
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "b"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert read_tool_use({"tools": TOOLS, "tool_choice": choice}).names == ("b",)


def test_what_no_grammar_could_hold_is_refused() -> None:
    huge = {"type": "object", "properties": {f"p{n}": {"enum": ["x" * 99]} for n in range(900)}}
    tool = {"type": "function", "function": {"name": "f", "parameters": huge}}
    use = read_tool_use({"tools": [tool], "tool_choice": "required"})
    with pytest.raises(ApiError) as caught:
        use.grammar()
    assert caught.value.param == "tools"
