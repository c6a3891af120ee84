"""Reads which tools a model may call and whether it must."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import orjson

from api.errors import ApiError, Verdict, invalid, show
from api.parameter_checks import Values, read_flag
from api.structured_output import StructuredOutput
from grammar.grammar import Grammar, GrammarError, GrammarKind

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 * 1024  # of all together, as JSON
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ANYTHING: Mapping[str, object] = {"type": "object"}

Tool = dict[str, object]


class Choice(StrEnum):
    """Whether tools are called."""

    NONE = "none"
    AUTO = "auto"  # the model decides
    REQUIRED = "required"  # at least one
    NAMED = "named"  # this one, once


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Invariant: every name is a tool's, and where a call is enforced there is one to call."""

    tools: Sequence[Tool] = ()  # as OpenAI writes them, for the template
    choice: Choice = Choice.NONE
    is_parallel: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """What may be called."""
        return tuple(str(_function(tool)["name"]) for tool in self.tools)

    @property
    def is_enforced(self) -> bool:
        """Whether the answer is calls and nothing else."""
        return self.choice in {Choice.REQUIRED, Choice.NAMED}

    def grammar(self) -> StructuredOutput:
        """Return what an enforced answer must match: a list of calls with the right arguments."""
        definitions = {
            f"tool{index}": _moved(_function(tool).get("parameters") or _ANYTHING, f"tool{index}")
            for index, tool in enumerate(self.tools)
        }
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    "arguments": {"$ref": f"#/$defs/tool{index}"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for index, name in enumerate(self.names)
        ]
        schema: dict[str, object] = {
            "$defs": definitions,
            "type": "array",
            "minItems": 1,
            "items": {"anyOf": calls},
        }
        if self.choice is Choice.NAMED or not self.is_parallel:
            schema["maxItems"] = 1
        try:
            grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=orjson.dumps(schema).decode())
        except GrammarError as error:
            raise invalid(f"tools are too large to enforce a call: {error}", "tools") from None
        return StructuredOutput(grammar=grammar, field="tools")


def read_tool_use(values: Values) -> ToolUse:
    """Read tools, tool_choice and parallel_tool_calls; tools that may not be called are dropped."""
    tools = _read_tools(values.get("tools"))
    parallel = values.get("parallel_tool_calls")
    is_parallel = parallel is None or read_flag(values, "parallel_tool_calls")
    use = ToolUse(
        tools=tools, choice=Choice.AUTO if tools else Choice.NONE, is_parallel=is_parallel
    )
    choice = values.get("tool_choice")
    return use if choice is None else _chosen(use, choice)


def _chosen(use: ToolUse, choice: object) -> ToolUse:
    if choice == "auto":
        return use
    if choice == "none":
        return replace(use, tools=(), choice=Choice.NONE)
    if choice == "required":
        return replace(_with_tools(use), choice=Choice.REQUIRED)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(choice, dict) and kind == "function":
        name = _mapping(choice.get("function"), "tool_choice.function").get("name")
        return replace(_only(use, [name], "tool_choice.function.name"), choice=Choice.NAMED)
    if isinstance(choice, dict) and kind == "allowed_tools":
        return _allowed(use, _mapping(choice.get("allowed_tools"), "tool_choice.allowed_tools"))
    raise invalid(
        "tool_choice must be none, auto, required or an object of type function or "
        f"allowed_tools, got {show(choice)}",
        "tool_choice",
    )


def _allowed(use: ToolUse, allowed: Mapping[str, object]) -> ToolUse:
    place = "tool_choice.allowed_tools"
    wanted = allowed.get("tools")
    if not isinstance(wanted, list) or not 1 <= len(wanted) <= MAX_TOOLS:
        raise invalid(f"{place}.tools must be a list of 1 to {MAX_TOOLS} tools", f"{place}.tools")
    names = [
        _mapping(_mapping(tool, f"{place}.tools").get("function"), f"{place}.tools").get("name")
        for tool in wanted
    ]
    return _chosen(_only(use, names, f"{place}.tools"), allowed.get("mode", "auto"))


def _only(use: ToolUse, names: Sequence[object], place: str) -> ToolUse:
    by_name = dict(zip(use.names, use.tools, strict=True))
    for name in names:
        if not isinstance(name, str) or name not in by_name:
            raise invalid(f"{place} must name one of tools, got {show(name)}", place)
    return replace(use, tools=tuple(by_name[str(name)] for name in names))


def _with_tools(use: ToolUse) -> ToolUse:
    if not use.tools:
        raise invalid("tool_choice is required but there are no tools; give some", "tools")
    return use


def _read_tools(value: object) -> tuple[Tool, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise invalid(f"tools must be a list of at most {MAX_TOOLS} tools", "tools")
    tools = tuple(_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(value))
    names = {_function(tool)["name"] for tool in tools}
    if len(names) < len(tools):
        raise invalid("tools must have names that differ", "tools")
    if tools and (size := len(orjson.dumps(tools))) > MAX_TOOLS_BYTES:
        raise invalid(
            f"tools must have at most {MAX_TOOLS_BYTES} bytes of JSON, got {size}", "tools"
        )
    return tools


def _read_tool(value: object, place: str) -> Tool:
    kind = _mapping(value, place).get("type")
    if kind != "function":
        raise ApiError(
            Verdict.UNSUPPORTED,
            f"{place}.type must be 'function', got {show(kind)}; no other tool is served",
            param=f"{place}.type",
        )
    function = _mapping(_mapping(value, place).get("function"), f"{place}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(
            f"{place}.function.name must have 1 to 64 letters, digits, _, - or ., got {show(name)}",
            f"{place}.function.name",
        )
    read: dict[str, object] = {"name": name}
    description = function.get("description")
    if description is not None:
        if not isinstance(description, str):
            raise invalid(
                f"{place}.function.description must be a string", f"{place}.function.description"
            )
        read["description"] = description
    parameters = function.get("parameters")
    read["parameters"] = (
        {"type": "object", "properties": {}}
        if parameters is None
        else dict(_mapping(parameters, f"{place}.function.parameters"))
    )
    return {"type": "function", "function": read}


def _function(tool: Tool) -> Mapping[str, object]:
    function = tool["function"]
    assert isinstance(function, dict)
    return function


def _mapping(value: object, place: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise invalid(f"{place} must be an object, got {show(value)}", place)
    return value


def _moved(schema: object, name: str) -> object:
    """A tool's schema below another root: its references to itself go there too."""
    if isinstance(schema, dict):
        return {
            key: f"#/$defs/{name}{each[1:]}"
            if key == "$ref" and isinstance(each, str) and each.startswith("#")
            else _moved(each, name)
            for key, each in schema.items()
        }
    if isinstance(schema, list):
        return [_moved(each, name) for each in schema]
    return schema
