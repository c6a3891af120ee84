"""The parts of a message, as they come: a call's pieces follow each other under one index."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol


class PartKind(StrEnum):
    """What a piece of text is."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of one part of a message."""

    kind: PartKind
    text: str  # of a call: of its arguments, which are JSON
    call_index: int = 0
    call_id: str = ""  # with a call's first piece only, as is the name
    name: str = ""

    @property
    def begins_call(self) -> bool:
        """Whether it is the first piece of a call."""
        return bool(self.call_id)

    def continues(self, other: "Part") -> bool:
        """Whether it belongs to the same part of the message as the piece before it."""
        is_same = self.kind is other.kind and self.call_index == other.call_index
        return is_same and not self.begins_call


class MessageParser(Protocol):
    """Takes a message's text piece by piece. All parts joined do not depend on the pieces."""

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is thought, as far as is known."""
        ...

    def push(self, text: str) -> list[Part]:
        """Take new text and return the parts that are sure by now."""
        ...

    def flush(self) -> list[Part]:
        """Return the rest: the text is over."""
        ...


def content(text: str) -> list[Part]:
    """What is said; nothing for no text."""
    return [Part(PartKind.CONTENT, text)] if text else []


def reasoning(text: str) -> list[Part]:
    """What is thought; nothing for no text."""
    return [Part(PartKind.REASONING, text)] if text else []


def join_parts(parts: Iterable[Part]) -> list[Part]:
    """Put the pieces of each part together."""
    joined: list[Part] = []
    for part in parts:
        if joined and part.continues(joined[-1]):
            joined[-1] = replace(joined[-1], text=joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined


def text_of(parts: Sequence[Part], kind: PartKind) -> str:
    """All text of one kind."""
    return "".join(part.text for part in parts if part.kind is kind)
