"""Reads single values out of a client's request, or gives a verdict that names the field.

`None` is the same as absent, a bool is never a number, and no check depends on how the value came
(JSON or protobuf).
"""

import math
from collections.abc import Mapping

from api.errors import invalid, show

Values = Mapping[str, object]

MAX_INT32 = 2**31 - 1
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 128


def read_number(
    values: Values, name: str, *, default: float, low: float, high: float, is_open: bool = False
) -> float:
    """Read a finite number in [low, high], or in (low, high] when `is_open`."""
    value = values.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(f"{name} must be a number, got {show(value)}", name)
    is_inside = low < value <= high if is_open else low <= value <= high
    if not (math.isfinite(value) and is_inside):
        interval = f"{'(' if is_open else '['}{low:g}, {high:g}]"
        raise invalid(f"{name} must be in {interval}, got {show(value)}", name)
    return float(value)


def read_integer(values: Values, name: str, *, low: int, high: int = MAX_INT32) -> int | None:
    """Read an integer in [low, high]; None when it is absent."""
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(f"{name} must be an integer, got {show(value)}", name)
    if value < low:
        raise invalid(f"{name} must be at least {low}, got {show(value)}", name)
    if value > high:
        raise invalid(f"{name} must be at most {high}, got {show(value)}", name)
    return value


def read_flag(values: Values, name: str) -> bool:
    """Read true or false; absent is false."""
    value = values.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise invalid(f"{name} must be true or false, got {show(value)}", name)
    return value


def read_text(values: Values, name: str, *, max_characters: int) -> str | None:
    """Read a string; None when it is absent."""
    value = values.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise invalid(f"{name} must be a string, got {show(value)}", name)
    if len(value) > max_characters:
        raise invalid(f"{name} must have at most {max_characters} characters", name)
    return value


def read_stops(values: Values, name: str = "stop") -> tuple[str, ...]:
    """Read one string or one to four of them, none empty."""
    value = values.get(name)
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not 1 <= len(stops) <= MAX_STOPS:
        raise invalid(f"{name} must be a string or a list of 1 to {MAX_STOPS} strings", name)
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise invalid(
                f"{name} must hold strings of 1 to {MAX_STOP_CHARACTERS} characters, "
                f"got {show(stop)}",
                name,
            )
    return tuple(stops)


def read_token_ids(value: object, name: str, *, vocab_size: int, max_ids: int) -> list[int]:
    """Read a list of token ids the model knows."""
    if not isinstance(value, list):
        raise invalid(f"{name} must be a list of token ids, got {show(value)}", name)
    if len(value) > max_ids:
        raise invalid(f"{name} must have at most {max_ids} token ids, got {len(value)}", name)
    for token_id in value:
        if type(token_id) is not int:
            raise invalid(f"{name} must hold integers only, got {show(token_id)}", name)
        if not 0 <= token_id < vocab_size:
            raise invalid(
                f"{name} must hold token ids from 0 to {vocab_size - 1}, got {show(token_id)}", name
            )
    return value


def is_neutral(value: object, neutral_values: tuple[object, ...]) -> bool:
    """Tell whether a value changes nothing; unlike `==`, true is not 1."""
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in neutral_values
    )
