"""Tool calls in a model's text: after a mark, or where the text begins with one.

content --mark--> between calls --{--> in a call --}--> between calls --other text--> content
"""

import secrets
import string
from collections.abc import Collection
from dataclasses import dataclass

from api.parsers.call_scanner import CallScanner
from api.parsers.held_text import num_held
from api.parsers.part import Part, PartKind, content

MAX_HEAD_CHARACTERS = 256  # of a name before its arguments, with all that may stand about it

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """How one family of models writes calls."""

    mark: str  # what begins calls
    between: tuple[str, ...]  # what may stand before, between and after the objects
    may_start_bare: bool = False  # a text that begins with an object is a call
    name_end: str = ""  # when the name stands before an object of arguments: what ends it
    id_length: int = 24  # of a call's id; some templates insist on one


HERMES = CallSyntax(mark="<tool_call>", between=("</tool_call>", "<tool_call>"))
LLAMA3 = CallSyntax(
    mark="<|python_tag|>", between=("<|python_tag|>", ";", "<|eom_id|>"), may_start_bare=True
)
MISTRAL = CallSyntax(mark="[TOOL_CALLS]", between=("[TOOL_CALLS]", "[", ",", "]"), id_length=9)
MISTRAL_NAMED = CallSyntax(
    mark="[TOOL_CALLS]", between=("[TOOL_CALLS]",), name_end="[ARGS]", id_length=9
)
# What a grammar of ours made: a list, and nothing else.
LISTED = CallSyntax(mark="[", between=("[", ",", "]"))


def new_call_id(length: int) -> str:
    """Return a fresh id: `call_...`, or as short as a template wants it."""
    random = "".join(secrets.choice(_LETTERS) for _ in range(length))
    return random if length < 10 else f"call_{random}"


class CallParser:
    """Splits text into content and calls. What turns out to be no call is content after all."""

    is_reasoning = False

    def __init__(
        self, syntax: CallSyntax, *, names: Collection[str], is_parallel: bool = True
    ) -> None:
        self._syntax = syntax
        self._names = names
        self._is_parallel = is_parallel
        self._held = ""
        self._is_at_start = True
        self._is_between = False
        self._opening = ""  # the mark and what followed, should it be no call
        self._scanner: CallScanner | None = None
        self._num_calls = 0
        self._is_begun = False  # the scanner's call was told of

    def push(self, text: str) -> list[Part]:
        """Take new text and return the parts that are sure by now."""
        parts: list[Part] = []
        text, self._held = self._held + text, ""
        while text:
            if self._scanner is not None:
                text = self._scan(self._scanner, text, parts)
            elif self._is_between:
                text = self._look_between(text, parts)
            else:
                text = self._look_for_mark(text, parts)
        return parts

    def flush(self) -> list[Part]:
        """Return the rest: the text is over."""
        parts: list[Part] = []
        scanner = self._scanner
        if scanner is not None:
            parts += [] if scanner.is_call else content(self._opening + scanner.raw)
        elif self._is_between and self._num_calls:
            self._held = self._held.strip()
        elif self._is_between:
            self._held = self._opening + self._held
        return parts + content(self._held)

    def _look_for_mark(self, text: str, parts: list[Part]) -> str:
        """Content, up to the mark; blanks before it belong to nobody."""
        bare = text.lstrip()
        if self._is_at_start and self._syntax.may_start_bare and bare.startswith("{"):
            self._is_at_start, self._is_between = False, True
            self._opening = text[: len(text) - len(bare)]
            return bare
        before, mark, after = text.partition(self._syntax.mark)
        if mark:
            parts += content(before.rstrip())
            self._is_at_start, self._is_between, self._opening = False, True, mark
            return after
        num = num_held(text, (self._syntax.mark,))
        sure = text[: len(text) - num].rstrip()
        self._held = text[len(sure) :]
        self._is_at_start = self._is_at_start and not sure
        parts += content(sure)
        return ""

    def _look_between(self, text: str, parts: list[Part]) -> str:
        """Find the next call, or the end of all."""
        syntax, bare = self._syntax, text.lstrip()
        for word in syntax.between:
            if bare.startswith(word):
                self._opening += text[: len(text) - len(bare)] + word
                return bare[len(word) :]
        if not bare or any(word.startswith(bare) for word in syntax.between):
            self._held = text
            return ""
        if syntax.name_end:
            return self._look_for_name(text, bare, parts)
        if bare.startswith("{"):
            self._begin(CallScanner(names=self._names if syntax.may_start_bare else None))
            return bare
        return self._leave(text, parts)

    def _look_for_name(self, text: str, bare: str, parts: list[Part]) -> str:
        name, end, after = bare.partition(self._syntax.name_end)
        head, brace, _ = name.partition("{")
        if brace:  # the mark may be missing
            name, end, after = head, brace, bare[len(head) :]
        elif not end and len(bare) <= MAX_HEAD_CHARACTERS:
            self._held = text
            return ""
        name = name.partition("[CALL_ID]")[0].strip()
        if not name or not end:
            return self._leave(text, parts)
        self._begin(CallScanner(name=name))
        return after

    def _begin(self, scanner: CallScanner) -> None:
        self._scanner, self._is_begun = scanner, False

    def _leave(self, text: str, parts: list[Part]) -> str:
        """No call stands here; before the first one, the mark was mere text."""
        self._is_between = False
        if self._num_calls:
            return text
        parts += content(self._opening)
        parts += content(text[:1])  # or it could be taken for a call again
        return text[1:]

    def _scan(self, scanner: CallScanner, text: str, parts: list[Part]) -> str:
        rest = scanner.push(text)
        if scanner.is_call:
            parts += self._told(scanner)
        elif scanner.is_broken:
            parts += content(self._opening + scanner.raw)
            self._is_between = False
        if scanner.is_done or scanner.is_broken:
            self._num_calls += scanner.is_call
            self._scanner, self._opening = None, ""
        return rest

    def _told(self, scanner: CallScanner) -> list[Part]:
        text = scanner.take_arguments()
        if self._num_calls and not self._is_parallel:
            return []
        if not self._is_begun:
            self._is_begun = True
            call_id = new_call_id(self._syntax.id_length)
            return [Part(PartKind.CALL, text, self._num_calls, call_id, scanner.name)]
        return [Part(PartKind.CALL, text, self._num_calls)] if text else []
