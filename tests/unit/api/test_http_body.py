"""The depth of a body, judged before it is parsed."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.http_body import MAX_DEPTH, has_too_deep_nesting

JSON = st.recursive(
    st.none() | st.integers() | st.text(alphabet='ab[]{}"\\\n'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a[]{}"\\'), inner),
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
