"""GPT-OSS's messages: channels for thoughts, answers and calls.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`
"""

import re

from api.parsers.calls import new_call_id
from api.parsers.held_text import num_held
from api.parsers.part import Part, PartKind, content, reasoning

MARKS = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|constrain|>",
)
_MARK = re.compile("|".join(re.escape(mark) for mark in MARKS))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.-]+)")


class HarmonyParser:
    """Splits text by its channels. Invariant: a header is never shown."""

    def __init__(self, *, is_parallel: bool = True) -> None:
        self._is_parallel = is_parallel
        self._held = ""
        self._header: str | None = ""  # None: inside a message
        self._kind = PartKind.CONTENT
        self._num_calls = 0

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is thought, as far as is known."""
        return self._header is None and self._kind is PartKind.REASONING

    def push(self, text: str) -> list[Part]:
        """Take new text and return the parts that are sure by now."""
        text, self._held = self._held + text, ""
        parts: list[Part] = []
        start = 0
        for match in _MARK.finditer(text):
            parts += self._take_text(text[start : match.start()])
            parts += self._take_mark(match.group())
            start = match.end()
        num = num_held(text[start:], MARKS)
        self._held = text[len(text) - num :] if num else ""
        return parts + self._take_text(text[start : len(text) - num])

    def flush(self) -> list[Part]:
        """Return the rest: the text is over."""
        parts = self._take_text(self._held)
        if self._header and "<|" not in self._header:
            return parts + content(self._header)  # it kept to no channels at all
        return parts

    def _take_text(self, text: str) -> list[Part]:
        if self._header is not None:
            self._header += text
            return []
        if self._kind is PartKind.REASONING:
            return reasoning(text)
        if self._kind is PartKind.CONTENT:
            return content(text)
        is_told = text and (self._is_parallel or self._num_calls == 1)
        return [Part(PartKind.CALL, text, self._num_calls - 1)] if is_told else []

    def _take_mark(self, mark: str) -> list[Part]:
        if mark == "<|message|>" and self._header is not None:
            header, self._header = self._header, None
            return self._open(header)
        if mark in {"<|end|>", "<|call|>", "<|return|>", "<|start|>"}:
            self._header = ""
        elif self._header is not None:
            self._header += mark
        return []

    def _open(self, header: str) -> list[Part]:
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient is not None:
            self._kind = PartKind.CALL
            self._num_calls += 1
            if self._num_calls > 1 and not self._is_parallel:
                return []
            name, index = recipient.group(1), self._num_calls - 1
            return [Part(PartKind.CALL, "", index, new_call_id(24), name)]
        is_thought = channel is not None and channel.group(1) == "analysis"
        self._kind = PartKind.REASONING if is_thought else PartKind.CONTENT
        return []
