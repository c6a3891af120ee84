"""A grammar as it travels: its kind and its text."""

from dataclasses import dataclass
from enum import StrEnum

# Of text. With the stack that compiles it (see stack.py) no grammar of this size overflows one.
MAX_GRAMMAR_BYTES = 64 * 1024
MAX_COMPILE_S = 2.0  # of processor time, in the process that checks it


class GrammarKind(StrEnum):
    """How the text is to be read."""

    JSON_SCHEMA = "json"
    REGEX = "regex"  # the whole output, not a part of it
    CHOICE = "choice"  # a JSON list of strings
    CFG = "grammar"  # Lark or GBNF


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """One grammar; equal ones are compiled once."""

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        """Refuse by size alone what would cost too much."""
        num_bytes = len(self.text.encode(errors="replace"))
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise GrammarError(
                f"it has {num_bytes} bytes; the limit is {MAX_GRAMMAR_BYTES}; make it smaller"
            )


class GrammarError(ValueError):
    """This grammar cannot be enforced; the message says why, in words for whoever wrote it."""
