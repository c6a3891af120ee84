"""Renders a chat by the model's own template, so that no message can pose as the template.

A message that spells a control token (`<|im_end|>`) means the characters, not the token. Before
rendering, each such spelling is replaced by a marker; afterwards the text falls apart at the
markers into pieces to be encoded with control tokens and pieces to be encoded as plain characters.
Chats without such spellings, nearly all, are one piece and get exactly the ids the template's
author meant.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from api.chat.conversation import Conversation
from api.chat.dialect_probe import reads_calls_back
from api.chat.messages import Message
from api.chat.tool_prompt import with_tools
from api.errors import MAX_ECHO_CHARACTERS, invalid
from api.parsers.calls import HERMES
from api.parsers.reading import Dialect
from api.parsers.thoughts import OPEN

_LOGGER = logging.getLogger(__name__)

# Private-use characters: trim and case filters of templates leave them alone.
_MARKER_START, _MARKER_END = "\ue0a0\ue0a1", "\ue0a2"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the rendered text."""

    text: str
    is_plain: bool  # control tokens in it are mere characters


class ChatTemplate:
    """Owns the template of one model. ApiError when it refuses a conversation."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, control_tokens: Sequence[str]) -> None:
        # Looked up once: what transformers does for each chat took longer than rendering.
        self._special_tokens = dict(tokenizer.special_tokens_map)
        self._sources = {has_tools: _source(tokenizer, has_tools) for has_tools in (False, True)}
        # The longest first, so that a token that begins another does not split it.
        # A marker typed by a client is protected in the same way: it means its characters.
        spellings = sorted([*control_tokens, _MARKER_START], key=len, reverse=True)
        self._spelling = re.compile("|".join(re.escape(each) for each in spellings if each))
        self.dialect = Dialect.of(_all_sources(tokenizer))
        if self.dialect.has_tools and not reads_calls_back(self.dialect, tokenizer):
            _LOGGER.info("Calls as the chat template writes them are not read: Hermes' words it is")
            self.dialect = replace(self.dialect, has_tools=False, syntax=HERMES)

    def render(self, chat: Conversation) -> list[Piece]:
        """Return the prompt of a chat, ending where the assistant is to speak."""
        messages, tools = chat.messages, chat.tool_use.tools
        if not self.dialect.has_tools:
            messages, tools = with_tools(messages, tools), ()
        if not self._sources[bool(tools)]:
            raise invalid("This model has no chat template; use /v1/completions", "messages")
        spelled: list[str] = []
        protected = [self._protect(message, spelled) for message in messages]
        shown = [self._protect(tool, spelled) for tool in tools]
        text = self._apply(protected, shown, chat.template_kwargs)
        _check_nothing_lost(protected, text)
        return _split(text, spelled)

    def _protect(self, value: Any, spelled: list[str]) -> Any:
        """Mark control tokens in every text of a message or a tool, but not in its role."""

        def mark(match: re.Match[str]) -> str:
            spelled.append(match.group())
            return f"{_MARKER_START}{len(spelled) - 1}{_MARKER_END}"

        def protect(each: Any) -> Any:
            if isinstance(each, str):
                return self._spelling.sub(mark, each)
            if isinstance(each, dict):
                return {
                    protect(key): inner if key == "role" else protect(inner)
                    for key, inner in each.items()
                }
            return [protect(inner) for inner in each] if isinstance(each, list) else each

        return protect(value)

    def _apply(
        self, messages: Sequence[Message], tools: Sequence[Any], kwargs: Mapping[str, object]
    ) -> str:
        try:
            (text,), _ = render_jinja_template(
                conversations=[list(messages)],
                tools=list(tools) or None,
                chat_template=self._sources[bool(tools)],
                add_generation_prompt=True,
                **{**self._special_tokens, **kwargs},
            )
        except TemplateError as error:
            raise invalid(
                f"The chat template refuses this chat: {_reason(error)}", "messages"
            ) from error
        except Exception as error:
            # The template is a program of others: a chat its author did not think of breaks it.
            _LOGGER.info("The chat template broke", exc_info=error)
            raise invalid("The chat template cannot render this chat", "messages") from error
        assert isinstance(text, str)
        return text


def _source(tokenizer: PreTrainedTokenizerFast, has_tools: bool) -> str:
    """The template of chats with tools, or of those without; empty when there is none."""
    try:
        source: str = tokenizer.get_chat_template(tools=[{}] if has_tools else None)
    except ValueError:
        return ""
    return source


def _all_sources(tokenizer: PreTrainedTokenizerFast) -> str:
    """All of a model's templates: some have one of their own for tools."""
    template = tokenizer.chat_template or ""
    return template if isinstance(template, str) else "\n".join(template.values())


def opens_thought(text: str) -> bool:
    """Tell whether a rendered prompt ends where a thought begins."""
    return text.rstrip().endswith(OPEN)


def _reason(error: TemplateError) -> str:
    return (error.message or type(error).__name__)[: 2 * MAX_ECHO_CHARACTERS]


def _check_nothing_lost(messages: Sequence[Message], text: str) -> None:
    """Refuse a chat whose system message the template drops (Gemma's does, with no user's)."""
    for index, message in enumerate(messages):
        if message["role"] == "system" and str(message["content"]).strip() not in text:
            raise invalid(
                f"The chat template has no place for messages[{index}] in this chat",
                f"messages[{index}]",
            )


def _split(text: str, spelled: Sequence[str]) -> list[Piece]:
    if not spelled:
        return [Piece(text, is_plain=False)]
    pieces: list[Piece] = []
    parts = re.split(f"{_MARKER_START}(\\d+){_MARKER_END}", text)
    for position, part in enumerate(parts):
        is_plain = position % 2 == 1
        if part:
            pieces.append(Piece(spelled[int(part)] if is_plain else part, is_plain=is_plain))
    return pieces
