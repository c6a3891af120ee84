"""A chat as every face hands it on: messages, tools, and what its template is told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from api.chat.messages import Message, num_characters, read_messages
from api.chat.tools import ToolUse, read_tool_use
from api.errors import ApiError, Verdict, invalid, show
from api.parameter_checks import Values

# What a client may tell a template. Whatever else there is belongs to the renderer.
TEMPLATE_KWARGS = frozenset({"enable_thinking", "thinking", "reasoning_effort", "date_string"})
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_KWARG_CHARACTERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One chat, judged but not yet rendered."""

    messages: Sequence[Message]
    tool_use: ToolUse = field(default_factory=ToolUse)
    template_kwargs: Mapping[str, object] = field(default_factory=dict)

    @property
    def num_characters(self) -> int:
        """How much there is to render and tokenise."""
        return num_characters(self.messages) + num_characters(self.tool_use.tools)


def read_conversation(values: Values) -> Conversation:
    """Read the fields that make the prompt; ApiError names the one that is wrong."""
    tool_use = read_tool_use(values)
    kwargs = _read_kwargs(values)
    if tool_use.is_enforced:
        # The answer is a list of calls from its first token on.
        kwargs = {"enable_thinking": False, **kwargs}
    return Conversation(
        messages=read_messages(values.get("messages")), tool_use=tool_use, template_kwargs=kwargs
    )


def _read_kwargs(values: Values) -> dict[str, object]:
    kwargs: dict[str, object] = {}
    effort = values.get("reasoning_effort")
    if effort is not None:
        if effort not in EFFORTS:
            name = "reasoning_effort"
            raise invalid(f"{name} must be one of {', '.join(EFFORTS)}, got {show(effort)}", name)
        kwargs["reasoning_effort"] = effort
        kwargs["enable_thinking"] = effort != "none"
    given = values.get("chat_template_kwargs")
    if given is None:
        return kwargs
    if not isinstance(given, dict):
        raise invalid(
            f"chat_template_kwargs must be an object, got {show(given)}", "chat_template_kwargs"
        )
    return kwargs | {key: _read_kwarg(key, value) for key, value in given.items()}


def _read_kwarg(key: str, value: object) -> object:
    if key not in TEMPLATE_KWARGS:
        raise ApiError(
            Verdict.UNSUPPORTED,
            f"chat_template_kwargs may have {', '.join(sorted(TEMPLATE_KWARGS))}, got {show(key)}",
            param="chat_template_kwargs",
        )
    is_word = isinstance(value, str) and len(value) <= MAX_KWARG_CHARACTERS
    if not is_word and not isinstance(value, bool | int):
        raise invalid(
            f"chat_template_kwargs.{key} must be true, false, an integer or a short string",
            "chat_template_kwargs",
        )
    return value
