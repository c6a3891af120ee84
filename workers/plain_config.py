"""Reads nested configuration classes from plain data, such as a JSON file, and writes them back."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

ConfigT = TypeVar("ConfigT")


def from_plain(config_class: type[ConfigT], data: Mapping[str, Any], *, path: str = "") -> ConfigT:
    """Build `config_class` (a dataclass, nested ones included); ValueError names an unknown key."""
    if not isinstance(data, Mapping):
        raise ValueError(f"Got {data!r} at {path or 'the top'} but expected a table of keys")
    hints = typing.get_type_hints(config_class)
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in hints:
            nearest = difflib.get_close_matches(key, hints, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise ValueError(f"Got unknown key {path}{key}{hint}")
        nested = _nested_class(hints[key])
        is_nested = nested is not None and value is not None
        values[key] = from_plain(nested, value, path=f"{path}{key}.") if is_nested else value
    try:
        return config_class(**values)
    except TypeError as error:
        raise ValueError(f"Got an incomplete {path or 'configuration'}: {error}") from error


def to_plain(config: Any) -> dict[str, Any]:
    """Plain data that `from_plain` reads back to an equal object."""
    return dataclasses.asdict(config)


def _nested_class(hint: Any) -> Any:
    """The dataclass in `X` or `X | None`, or None for any other hint."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if isinstance(option, type) and dataclasses.is_dataclass(option):
            return option
    return None
