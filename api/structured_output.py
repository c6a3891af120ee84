"""What a text must match: OpenAI's `response_format` and vLLM's `structured_outputs`."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import orjson

from api.errors import ApiError, Verdict, invalid, show
from api.json_text import parse_json
from api.parameter_checks import Values, is_neutral, read_flag
from grammar.grammar import Grammar, GrammarError, GrammarKind

MAX_CHOICES = 1024
MAX_NAME_CHARACTERS = 64

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """A grammar, not yet known to be sound, and the field it came from."""

    grammar: Grammar
    field: str


def read_structured_output(values: Values) -> StructuredOutput | None:
    """Read whichever of the two fields is there; None when the text is free."""
    response_format, own = values.get("response_format"), values.get("structured_outputs")
    wanted = _read_response_format(response_format) if response_format is not None else None
    if own is not None:
        if wanted is not None:
            raise invalid(
                "structured_outputs and response_format are both set; give one of them",
                "structured_outputs",
            )
        wanted = _read_structured_outputs(own)
    if wanted is not None and read_flag(values, "ignore_eos"):
        # A finished value allows nothing but the end.
        raise invalid(f"ignore_eos cannot be true with {wanted.field}; leave it out", "ignore_eos")
    return wanted


def _read_response_format(value: object) -> StructuredOutput | None:
    format_ = _object(value, "response_format")
    match format_.get("type"):
        case "text":
            return None
        case "json_object":
            return _schema(_ANY_OBJECT, "response_format")
        case "json_schema":
            return _read_json_schema(format_.get("json_schema"), "response_format.json_schema")
        case "structural_tag":
            raise _unserved("response_format.type", "structural_tag")
    raise invalid(
        "response_format.type must be text, json_object or json_schema, "
        f"got {show(format_.get('type'))}",
        "response_format.type",
    )


def _read_json_schema(value: object, field: str) -> StructuredOutput:
    wrapper = _object(value, field)
    name = wrapper.get("name")
    is_name = isinstance(name, str) and _NAME.fullmatch(name)
    if not isinstance(name, str) or not is_name or len(name) > MAX_NAME_CHARACTERS:
        raise invalid(
            f"{field}.name must have 1 to {MAX_NAME_CHARACTERS} letters, digits, _ or -, "
            f"got {show(name)}",
            f"{field}.name",
        )
    # Both ways are enforced here; only its type is judged.
    read_flag({f"{field}.strict": wrapper.get("strict")}, f"{field}.strict")
    return _schema(_object(wrapper.get("schema"), f"{field}.schema"), f"{field}.schema")


def _read_structured_outputs(value: object) -> StructuredOutput:
    name = "structured_outputs"
    fields = _object(value, name).items()
    given = {key: each for key, each in fields if not is_neutral(each, (None, False))}
    for key, constraint in given.items():
        if key not in _READERS:
            raise _unserved(f"{name}.{key[:MAX_NAME_CHARACTERS]}", constraint)
    if len(given) != 1:
        raise invalid(
            f"{name} must have exactly one of {', '.join(_READERS)}, got {len(given)} of them", name
        )
    ((key, constraint),) = given.items()
    return _READERS[key](constraint, f"{name}.{key}")


def _read_json(value: object, field: str) -> StructuredOutput:
    if isinstance(value, str):
        try:
            value = parse_json(value.encode())
        except ValueError as error:
            raise invalid(f"{field} cannot be read: {error}", field) from None
    return _schema(_object(value, field), field)


def _read_json_object(value: object, field: str) -> StructuredOutput:
    if value is not True:
        raise invalid(f"{field} must be true or false, got {show(value)}", field)
    return _schema(_ANY_OBJECT, field)


def _read_regex(value: object, field: str) -> StructuredOutput:
    return _wanted(GrammarKind.REGEX, _text(value, field), field)


def _read_grammar(value: object, field: str) -> StructuredOutput:
    return _wanted(GrammarKind.CFG, _text(value, field), field)


def _read_choice(value: object, field: str) -> StructuredOutput:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise invalid(f"{field} must be a list of 1 to {MAX_CHOICES} strings", field)
    for choice in value:
        _text(choice, field)
    return _wanted(GrammarKind.CHOICE, orjson.dumps(value).decode(), field)


_READERS: Mapping[str, Callable[[object, str], StructuredOutput]] = {
    "json": _read_json,
    "regex": _read_regex,
    "choice": _read_choice,
    "grammar": _read_grammar,
    "json_object": _read_json_object,
}


def _schema(schema: object, field: str) -> StructuredOutput:
    return _wanted(GrammarKind.JSON_SCHEMA, orjson.dumps(schema).decode(), field)


def _wanted(kind: GrammarKind, text: str, field: str) -> StructuredOutput:
    try:
        return StructuredOutput(grammar=Grammar(kind=kind, text=text), field=field)
    except GrammarError as error:
        raise invalid(f"{field} is too large: {error}", field) from None


def _object(value: object, field: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise invalid(f"{field} must be an object, got {show(value)}", field)
    return value


def _text(value: object, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise invalid(f"{field} must be text that is not empty, got {show(value)}", field)
    return value


def _unserved(field: str, value: object) -> ApiError:
    return ApiError(
        Verdict.UNSUPPORTED, f"{field} = {show(value)} is not served; leave it out", param=field
    )
