"""Reads JSON that a stranger wrote, at a cost that no text can drive up."""

import json

import numpy as np
import numpy.typing as npt
import orjson

MAX_DEPTH = 64
# Of a text in which a repeated name is looked for, to say which it is.
_MAX_SEARCHED_BYTES = 64 * 1024

# Of a text whose objects are looked at one by one: for a longer one passes in C are cheaper.
_MAX_WALKED_BYTES = 8 * 1024

_MARKS = b'"[]{}:'
_NOT_MARKS = bytes(set(range(256)) - set(_MARKS))


class RepeatedNameError(ValueError):
    """An object has a name twice; which of them counts would be anybody's guess."""

    def __init__(self, name: str | None) -> None:
        super().__init__(f"an object has a name twice{'' if name is None else f': {name[:64]!r}'}")
        self.name = name  # None: not looked for


def parse_json(text: bytes) -> object:
    """Return the value; ValueError says, without a word of the text, why there is none."""
    num_objects = text.count(b"{")  # at most: some may stand in strings, as may all marks
    if len(text) > _MAX_WALKED_BYTES or num_objects + text.count(b"[") > MAX_DEPTH:
        return _parse_with_care(text)
    # So few brackets cannot nest too deep, and with a name kept for each colon none came twice.
    value = _loads(text)
    if _num_names_in(value, num_objects) == text.count(b":"):
        return value
    return _parse_with_care(text)


def _parse_with_care(text: bytes) -> object:
    marks = _marks_outside_strings(text)
    if _depth(marks) > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    value = _loads(text)
    # Of equal names in one object the parser keeps one: then a colon is missing.
    if _num_names(marks) != _num_names_kept(value, text, marks):
        raise RepeatedNameError(_repeated_name(text))
    return value


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
    # Escaped backslashes go first, so that what then stands before a quote does escape it.
    text = text.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NOT_MARKS)
    marks = np.frombuffer(text, dtype=np.uint8)
    is_quote = marks == ord('"')
    is_outside = np.cumsum(is_quote, dtype=np.int32) % 2 == 0
    found: npt.NDArray[np.uint8] = marks[is_outside & ~is_quote]
    return found


def _depth(marks: npt.NDArray[np.uint8]) -> int:
    steps = np.zeros(len(marks) + 1, dtype=np.int8)
    steps[1:][(marks == ord("[")) | (marks == ord("{"))] = 1
    steps[1:][(marks == ord("]")) | (marks == ord("}"))] = -1
    return int(np.cumsum(steps, dtype=np.int32).max())


def _num_names(marks: npt.NDArray[np.uint8]) -> int:
    return int(np.count_nonzero(marks == ord(":")))


def _num_names_kept(value: object, text: bytes, marks: npt.NDArray[np.uint8]) -> int:
    if len(text) > _MAX_WALKED_BYTES:
        return _num_names(_marks_outside_strings(orjson.dumps(value)))
    return _num_names_in(value, int(np.count_nonzero(marks == ord("{"))))


def _num_names_in(value: object, num_left: int) -> int:
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
