"""Thoughts at the start of a message, between `<think>` and `</think>`."""

from api.parsers.held_text import num_held
from api.parsers.part import MessageParser, Part, content, reasoning

OPEN, CLOSE = "<think>", "</think>"


class ThoughtParser:
    """Splits thoughts off; the rest is another parser's, or content.

    `is_open`: the prompt ended with the opening mark, so that the text begins with a thought.
    Blanks around the marks belong to nobody.
    """

    def __init__(self, rest: MessageParser | None, *, is_open: bool) -> None:
        self._rest = rest
        self._held = ""
        self._is_open = is_open
        self._is_over = False
        self._is_at_start = True  # of the thought, or of what follows it

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is thought, as far as is known."""
        return self._is_open and not self._is_over

    def push(self, text: str) -> list[Part]:
        """Take new text and return the parts that are sure by now."""
        if self._is_over and not self._is_at_start:
            return self._say(text)
        text, self._held = self._held + text, ""
        if not self._is_open and not self._is_over:
            text = self._find_start(text)
        parts: list[Part] = []
        if self.is_reasoning:
            text = self._think(text, parts)
        return parts + self._say(text)

    def flush(self) -> list[Part]:
        """Return the rest: the text is over."""
        held, self._held = self._held, ""
        if self.is_reasoning:
            return reasoning(held.strip() and held)
        said = self._say(held)
        return said + (self._rest.flush() if self._rest else [])

    def _find_start(self, text: str) -> str:
        bare = text.lstrip()
        if OPEN.startswith(bare):  # also when there are blanks alone
            if bare == OPEN:
                self._is_open = True
                return ""
            self._held = text
            return ""
        if bare.startswith(OPEN):
            self._is_open = True
            return bare[len(OPEN) :]
        self._is_over, self._is_at_start = True, False
        return text

    def _think(self, text: str, parts: list[Part]) -> str:
        """Take thoughts up to the closing mark; return what stands behind it."""
        if self._is_at_start:
            text = text.lstrip()
        thought, mark, after = text.partition(CLOSE)
        if mark:
            parts += reasoning(thought.rstrip())
            self._is_over, self._is_at_start = True, True
            return after
        sure = text[: len(text) - num_held(text, (CLOSE,))].rstrip()
        self._held = text[len(sure) :]
        self._is_at_start = self._is_at_start and not sure
        parts += reasoning(sure)
        return ""

    def _say(self, text: str) -> list[Part]:
        if self._is_over and self._is_at_start and self._is_open:
            text = text.lstrip()
        if not text:
            return []
        self._is_at_start = False
        return self._rest.push(text) if self._rest else content(text)
