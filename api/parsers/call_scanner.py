"""Reads one call, a JSON object, while it is being written, so that its arguments can be streamed.

{"name": "get_weather", "arguments": {"city": "Oslo"}}
          ^ name known           ^^^^^^^^^^^^^^^^^ goes out as it comes
"""

import json
from collections.abc import Collection

_BLANKS = frozenset(" \t\r\n")
# Outside of strings JSON has no other characters.
_OUTSIDE = frozenset('{}[]:,"+-.0123456789truefalsnE') | _BLANKS
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})


class CallScanner:
    """Owns what is known of one call.

    Invariant: before `name` is known nothing is taken for arguments; once `is_broken`, or done
    without a name, `raw` is all that was read.
    """

    def __init__(self, *, names: Collection[str] | None = None, name: str = "") -> None:
        self.name = name
        self.is_done = False
        self.is_broken = False
        self._names = names  # None: any
        self._is_bare = bool(name)  # the object is the arguments
        self._raw: list[str] = []
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._string: list[str] = []  # the one at depth 1 that is being read
        self._key: str | None = None  # whose value is being read
        self._value: list[str] = []  # of the name, or of arguments that are a string
        self._arguments: list[str] = []
        self._has_arguments = False

    @property
    def raw(self) -> str:
        """All that was read, while it may still be no call."""
        return "".join(self._raw)

    @property
    def is_call(self) -> bool:
        """Whether its name is known, so that it is one."""
        return bool(self.name)

    def take_arguments(self) -> str:
        """Return what was learnt of the arguments since the last time; nothing before the name."""
        if not self.name:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def push(self, text: str) -> str:
        """Read on and return what stands behind the object's end."""
        for position, character in enumerate(text):
            if not self.name:
                self._raw.append(character)
            self._take(character)
            if self.is_done or self.is_broken:
                # What broke a call is not part of it; what is none is kept whole in `raw`.
                is_left = self.is_broken and self.is_call
                return text[position if is_left else position + 1 :]
        return ""

    def _take(self, character: str) -> None:
        if self._is_in_string:
            self._take_in_string(character)
            return
        if self._depth == 0 and character in _BLANKS:
            return
        if character not in _OUTSIDE or (self._depth == 0 and character != "{"):
            self.is_broken = True
            return
        if self._depth == 1 and not self._is_bare and character in ",}:":
            self._take_mark(character)
        elif character == '"':
            self._is_in_string = True
            self._string = ['"']
            self._note(character)
        else:
            self._note(character)
        if character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        self.is_done = self._depth == 0
        if self.is_done:
            self._finish()

    def _take_in_string(self, character: str) -> None:
        self._string.append(character)
        self._note(character)
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_in_string = False

    def _take_mark(self, mark: str) -> None:
        """A colon ends a key, a comma or the brace ends a value."""
        if mark == ":":
            self._key = _loaded("".join(self._string))
            self._value = []
            return
        value = "".join(self._value).strip()
        if self._key == "name" and not self.name:
            name = _loaded(value)
            if not name or (self._names is not None and name not in self._names):
                self.is_broken = True
            else:
                self.name = name
        elif self._key in _ARGUMENT_KEYS and value.startswith('"'):
            # Some models write the arguments as a string that holds JSON.
            self._arguments.append(_loaded(value) or "{}")
        self._key = None

    def _note(self, character: str) -> None:
        """Keep what the value at hand, or the arguments, consist of."""
        if self._is_bare:
            self._arguments.append(character)
        elif self._key == "name":
            self._value.append(character)
        elif self._key in _ARGUMENT_KEYS:
            is_first = not self._value
            if is_first and character in _BLANKS:
                return
            if is_first or self._value[0] == '"':
                self._value.append(character)
            if self._value[0] != '"':
                self._arguments.append(character)
            self._has_arguments = True

    def _finish(self) -> None:
        if not self.name:
            self.is_broken = True
        elif not self._has_arguments and not self._is_bare:
            self._arguments.append("{}")


def _loaded(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
