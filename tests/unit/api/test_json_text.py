"""JSON of strangers: its depth is judged before it is parsed, a repeated name afterwards."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.json_text import (
    MAX_DEPTH,
    MAX_OBJECTS,
    RepeatedNameError,
    has_too_deep_nesting,
    parse_json,
)

# Beyond 64 bits the parser reads a float, which every field of ours refuses or rounds itself.
WHOLE_NUMBERS = st.integers(min_value=-(2**63), max_value=2**64 - 1)
JSON = st.recursive(
    st.none() | WHOLE_NUMBERS | st.text(alphabet='ab:[]{}"\\\n'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a:[]{}"\\'), inner),
    max_leaves=60,
)


def depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max((depth(each) for each in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((depth(each) for each in value), default=0)
    return 0


def wrapped(value: object, levels: int) -> object:
    for level in range(levels):
        value = [value] if level % 2 else {'a]"\\': value}
    return value


@settings(max_examples=300, deadline=None)
@given(value=JSON, levels=st.integers(0, MAX_DEPTH + 4))
def test_depth_is_that_of_the_parsed_value(value: object, levels: int) -> None:
    value = wrapped(value, levels)
    body = json.dumps(value).encode()
    assert has_too_deep_nesting(body) == (depth(value) > MAX_DEPTH)


@pytest.mark.parametrize(
    "body",
    [b"[" * 65, b'{"a":' * 65, b"[" * 4_000_000, b'["x", ' + b"[[]," * 80],
    ids=lambda body: repr(body[:10]),
)
def test_unclosed_nesting_counts_too(body: bytes) -> None:
    assert has_too_deep_nesting(body)


@pytest.mark.parametrize(
    "body",
    [
        b'"' + b"[" * 1000 + b'"',
        b"[]" * 1000,
        b'["\\\\", "' + b"[" * 100 + b'"]',
        b'"\\"' + b"{" * 99,
    ],
    ids=lambda body: repr(body[:10]),
)
def test_brackets_in_strings_and_flat_lists_do_not_count(body: bytes) -> None:
    assert not has_too_deep_nesting(body)


@settings(max_examples=200, deadline=None)
@given(value=JSON)
def test_every_value_without_a_repeated_name_is_read(value: object) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value
    assert parse_json(json.dumps(value, indent=1).encode()) == value


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"n": 1, "n": 1}', "n"),
        ('{"a": {"b": 1, "c": [], "b": {}}}', "b"),
        ('[[{"": 0, "": 0}]]', ""),
        (r'{"a": 1, "\u0061": 2}', "a"),
        (r'{"x": "\u003a", "a": 1, "a": 2}', "a"),  # a colon in a string makes up for none
        ('{"a": 1, "a": ' + "9" * 300 + "}", "a"),
        ("{" + '"a":0,' * 20_000 + '"b":0}', None),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_repeated_name_is_refused(text: str, name: str | None) -> None:
    with pytest.raises(RepeatedNameError) as caught:
        parse_json(text.encode())
    assert caught.value.name == name


@settings(max_examples=100, deadline=None)
@given(value=JSON, name=st.sampled_from(["a", "b"]), padding=st.sampled_from(["", " " * 9000]))
def test_short_and_long_texts_are_judged_alike(value: object, name: str, padding: str) -> None:
    inner = json.dumps(value)
    text = f'{{"a": [{inner}, {inner}],{padding} "{name}": {inner}}}'.encode()
    if name == "b":
        assert parse_json(text) == {"a": [value, value], "b": value}
    else:
        with pytest.raises(RepeatedNameError):
            parse_json(text)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xef\xbb\xbf{}",
        b'{"a": "\xc4\xe3"}',
        b'{"a": "\xe2\x82"}',
        b"NaN",
        b"{'a': 1}",
        b'{"a": 1,}',
        b'{"a": "\\ud800"}',
    ],
)
def test_what_is_no_json_says_so(text: bytes) -> None:
    with pytest.raises(ValueError, match="JSON"):
        parse_json(text)


def test_objects_are_counted_before_they_are_made() -> None:
    assert parse_json(b"[" + b"{}," * (MAX_OBJECTS - 1) + b"{}]") == [{}] * MAX_OBJECTS
    text = '["' + "{" * 2 * MAX_OBJECTS + '"]'
    assert parse_json(text.encode()) == ["{" * 2 * MAX_OBJECTS]
    with pytest.raises(ValueError, match="more than 16384 objects"):
        parse_json(b"[" + b"{}," * MAX_OBJECTS + b"{}]")
