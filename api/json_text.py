"""Reads JSON that a stranger wrote, at a cost that no text can drive up."""

import json

import numpy as np
import numpy.typing as npt
import orjson

MAX_DEPTH = 64
MAX_OBJECTS = 16_384  # each of them may be looked at in Python: a message, a part, a schema
# Of a text in which a repeated name is looked for, to say which it is.
_MAX_SEARCHED_BYTES = 64 * 1024

# Of a text whose objects are looked at one by one: for a longer one passes in C are cheaper.
_MAX_SHORT_BYTES = 8 * 1024

_MARKS = b'"[]{}:'
_NOT_MARKS = bytes(set(range(256)) - set(_MARKS))


class RepeatedNameError(ValueError):
    """An object has a name twice; which of them counts would be anybody's guess."""

    def __init__(self, name: str | None) -> None:
        super().__init__(f"an object has a name twice{'' if name is None else f': {name[:64]!r}'}")
        self.name = name  # None: not looked for


def parse_json(text: bytes) -> object:
    """Return the value; ValueError says, without a word of the text, why there is none."""
    return _parse_long(text) if len(text) > _MAX_SHORT_BYTES else _parse_short(text)


def _parse_short(text: bytes) -> object:
    outside = b"".join(_unescaped(text).split(b'"')[::2])  # of strings
    num_objects = outside.count(b"{")
    if num_objects + outside.count(b"[") > MAX_DEPTH:
        _check_depth(_marks_outside_strings(text))
    value = _loads(text)
    # Of equal names in one object the parser keeps one: then a colon is missing.
    if outside.count(b":") != _num_names_kept(value, num_objects):
        raise RepeatedNameError(_repeated_name(text))
    return value


def _parse_long(text: bytes) -> object:
    marks = _marks_outside_strings(text)
    _check_depth(marks)
    if np.count_nonzero(marks == ord("{")) > MAX_OBJECTS:
        raise ValueError(f"it has more than {MAX_OBJECTS} objects")
    value = _loads(text)
    # Written anew and looked at in C, whatever it holds.
    if _num_names(marks) != _num_names(_marks_outside_strings(orjson.dumps(value))):
        raise RepeatedNameError(_repeated_name(text))
    return value


def _check_depth(marks: npt.NDArray[np.uint8]) -> None:
    if _depth(marks) > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


def _loads(text: bytes) -> object:
    try:
        value: object = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        # The parser's message is about places and kinds; the text itself stays out of it.
        raise ValueError(f"it is not valid JSON: {error.msg[:200]}") from None
    return value


def has_too_deep_nesting(text: bytes) -> bool:
    """Judge the depth before any object is built; brackets inside strings do not count."""
    return _depth(_marks_outside_strings(text)) > MAX_DEPTH


def _marks_outside_strings(text: bytes) -> npt.NDArray[np.uint8]:
    """What gives a text its form, in order.

    A few passes over the bytes, all of them in C: the text may be hostile and the loop must go on.
    """
    marks = np.frombuffer(_unescaped(text).translate(None, _NOT_MARKS), dtype=np.uint8)
    is_quote = marks == ord('"')
    is_outside = np.cumsum(is_quote, dtype=np.uint8) % 2 == 0  # overflow keeps it even or odd
    found: npt.NDArray[np.uint8] = marks[is_outside & ~is_quote]
    return found


def _unescaped(text: bytes) -> bytes:
    """The same without what is escaped, so that each quote left begins or ends a string."""
    # Escaped backslashes go first, so that what then stands before a quote does escape it.
    return text.replace(b"\\\\", b"").replace(b'\\"', b"")


def _depth(marks: npt.NDArray[np.uint8]) -> int:
    steps = np.zeros(len(marks) + 1, dtype=np.int8)
    steps[1:][(marks == ord("[")) | (marks == ord("{"))] = 1
    steps[1:][(marks == ord("]")) | (marks == ord("}"))] = -1
    return int(np.cumsum(steps, dtype=np.int32).max())


def _num_names(marks: npt.NDArray[np.uint8]) -> int:
    return int(np.count_nonzero(marks == ord(":")))


def _num_names_kept(value: object, num_left: int) -> int:
    """Count the names of all objects, of which there are no more than `num_left`."""
    num_names = 0
    around = [value]
    # Where an object was dropped with its name, there are fewer than the text has.
    while num_left and around:
        each = around.pop()
        if isinstance(each, dict):
            num_left -= 1
            num_names += len(each)
            around.extend(each.values())
        elif isinstance(each, list):
            around.extend(each)
    return num_names


def _repeated_name(text: bytes) -> str | None:
    """The first one, if the text is short enough to be searched; it is valid JSON."""
    if len(text) > _MAX_SEARCHED_BYTES:
        return None
    found: list[str] = []

    def look(pairs: list[tuple[str, object]]) -> dict[str, object]:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                found.append(name)
            seen.add(name)
        return {}

    # Numbers stay text: one with a million digits is nothing to look at.
    json.loads(text, object_pairs_hook=look, parse_int=str, parse_float=str)
    return found[0] if found else None
