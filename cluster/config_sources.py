"""Where configuration comes from: file, environment, command line; merged into one tree of keys."""

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import BaseModel

ENVIRONMENT_PREFIX = "RELEVO__"


class ConfigError(ValueError):
    """The configuration cannot be used; the message is one line for the person who wrote it."""


def read_file(path: Path) -> dict[str, Any]:
    """Read a YAML file of nested keys; an empty file is an empty tree."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the config file {path} is not valid YAML: {reason}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"the config file {path} holds {type(tree).__name__} but expected keys")
    return tree


def read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """`RELEVO__DECODE__REPLICAS=2` -> {"decode": {"replicas": "2"}}."""
    tree: dict[str, Any] = {}
    for name, text in environ.items():
        if name.startswith(ENVIRONMENT_PREFIX):
            keys = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
            _set(tree, keys, _value(text), source=name)
    return tree


def read_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """`["decode.replicas=2"]` -> {"decode": {"replicas": "2"}}; a later one wins."""
    tree: dict[str, Any] = {}
    for assignment in assignments:
        key, separator, text = assignment.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"got --set {assignment!r} but expected key.path=value")
        _set(tree, key.strip().split("."), _value(text), source=f"--set {assignment}")
    return tree


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `over` on `base`, section by section."""
    merged = dict(base)
    for key, value in over.items():
        under = merged.get(key)
        if isinstance(value, Mapping) and isinstance(under, Mapping):
            merged[key] = merge(under, value)
        else:
            merged[key] = value
    return merged


def check_keys(tree: Mapping[str, Any], schema: type, *, source: str) -> None:
    """Raise ConfigError for the first key that `schema` does not have, naming the nearest one."""
    known = {key for key, _ in dotted_keys(schema)}
    known |= {key[:end] for key in known for end, sign in enumerate(key) if sign == "."}
    tables = tuple(f"{key}." for key, default in dotted_keys(schema) if isinstance(default, dict))
    for key in _tree_keys(tree):
        if key in known or key.startswith(tables):
            continue
        peers = [name for name in known if name.count(".") == key.count(".")]
        close = [
            *difflib.get_close_matches(key, peers, n=1, cutoff=0.5),
            *difflib.get_close_matches(key, known, n=1, cutoff=0.5),
        ]
        sections = ", ".join(sorted({name.partition(".")[0] for name in known}))
        hint = f"did you mean {close[0]!r}?" if close else f"the sections are {sections}"
        raise ConfigError(f"unknown config key {key!r} in {source}; {hint}")


def dotted_keys(schema: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf key of the schema with its default."""
    for name, hint, default in _fields(schema):
        nested = _nested(hint)
        if nested is not None and default is not None:
            yield from dotted_keys(nested, f"{prefix}{name}.")
        elif nested is not None:  # an optional section that is off by default
            yield f"{prefix}{name}", None
            yield from dotted_keys(nested, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", default


def _fields(schema: type) -> Iterator[tuple[str, Any, Any]]:
    if issubclass(schema, BaseModel):
        for name, info in schema.model_fields.items():
            yield name, info.annotation, info.get_default(call_default_factory=True)
    elif dataclasses.is_dataclass(schema):
        hints = get_type_hints(schema)
        for field in dataclasses.fields(schema):
            has_default = field.default is not dataclasses.MISSING
            yield field.name, hints[field.name], field.default if has_default else None


def _nested(hint: Any) -> type | None:
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    for option in options:
        if not isinstance(option, type):
            continue
        if issubclass(option, BaseModel) or dataclasses.is_dataclass(option):
            return option
    return None


def _tree_keys(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _tree_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _set(tree: dict[str, Any], keys: list[str], value: Any, *, source: str) -> None:
    for depth, key in enumerate(keys[:-1]):
        branch = tree.setdefault(key, {})
        if not isinstance(branch, dict):
            raise ConfigError(f"{source}: {'.'.join(keys[: depth + 1])} has a value already")
        tree = branch
    tree[keys[-1]] = value


def _value(text: str) -> Any:
    """Text as it stands, for pydantic to convert; null and JSON-like collections are read."""
    if text.lower() in {"null", "~"}:
        return None
    if text[:1] in {"{", "["}:
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"got {text!r} but expected a JSON list or table") from error
    return text
