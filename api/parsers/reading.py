"""How to read what a model writes in a chat: told by its template, or by what was enforced."""

from collections.abc import Collection
from dataclasses import dataclass

from api.parsers.calls import HERMES, LISTED, LLAMA3, MISTRAL, MISTRAL_NAMED, CallParser, CallSyntax
from api.parsers.harmony import MARKS as HARMONY_MARKS
from api.parsers.harmony import HarmonyParser
from api.parsers.part import MessageParser
from api.parsers.thoughts import CLOSE, OPEN, ThoughtParser


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What a model's chat template tells of the way it writes."""

    syntax: CallSyntax = HERMES
    has_tools: bool = False  # the template itself shows tools to the model
    thinks: bool = False
    is_harmony: bool = False

    @classmethod
    def of(cls, template: str) -> "Dialect":
        """Read it off the marks the template writes."""
        return cls(
            syntax=_syntax_of(template),
            has_tools="tools" in template,
            thinks=CLOSE in template,
            is_harmony="<|channel|>" in template,
        )

    @property
    def marks(self) -> frozenset[str]:
        """Control tokens that carry the structure, so that a parser must see them."""
        if self.is_harmony:
            return frozenset(HARMONY_MARKS)
        named = {self.syntax.name_end} - {""}
        return frozenset({self.syntax.mark, *self.syntax.between, OPEN, CLOSE} | named)


def _syntax_of(template: str) -> CallSyntax:
    if "[TOOL_CALLS]" in template:
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
    if "<tool_call>" not in template and (
        "<|python_tag|>" in template or '"parameters"' in template
    ):
        return LLAMA3
    return HERMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How one request's answer is read. Without tools and thoughts nothing is to be read."""

    dialect: Dialect
    names: Collection[str] = ()  # of the tools that may be called
    is_parallel: bool = True
    is_enforced: bool = False  # by a grammar: a list of calls and nothing else
    is_named: bool = False  # and it is the one call the client named
    is_thinking: bool = False  # the prompt ends inside a thought

    @property
    def is_needed(self) -> bool:
        """Whether the text may hold anything but content."""
        return bool(self.names) or self.dialect.thinks or self.dialect.is_harmony

    def new_parser(self) -> MessageParser:
        """Return a parser at the start of a message."""
        if self.is_enforced:
            return CallParser(LISTED, names=self.names, is_parallel=self.is_parallel)
        if self.dialect.is_harmony:
            return HarmonyParser(is_parallel=self.is_parallel)
        calls = None
        if self.names:
            syntax = self.dialect.syntax
            calls = CallParser(syntax, names=self.names, is_parallel=self.is_parallel)
        if self.dialect.thinks:
            return ThoughtParser(calls, is_open=self.is_thinking)
        assert calls is not None, "nothing is to be read"
        return calls
