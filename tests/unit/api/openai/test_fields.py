"""Known, unserved, harmless and unknown fields of the OpenAI APIs."""

import pytest

from api.errors import ApiError, Verdict
from api.openai.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    HARMLESS_FIELDS,
    UNSERVED_FIELDS,
    check_fields,
    read_stream,
    warnings_header,
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 1_000_000),
        ("guided_json", {"type": "object"}),
        ("guided_regex", "a+"),
        ("echo", True),
        ("suffix", "x"),
        ("chat_template", "{{ x }}"),
        ("kv_transfer_params", {"host": "127.0.0.1"}),
        ("modalities", ["text", "audio"]),
    ],
    ids=repr,
)
def test_what_is_not_served_is_a_400_that_names_it(name: str, value: object) -> None:
    with pytest.raises(ApiError) as caught:
        check_fields({name: value}, CHAT_FIELDS, is_strict=False)
    assert caught.value.verdict is Verdict.UNSUPPORTED
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("user", 5),
        ("safety_identifier", 5),
        ("prompt_cache_retention", 24),
        ("metadata", "x"),
        ("store", 1),
        ("service_tier", {}),
    ],
)
def test_ignored_fields_are_judged_by_their_type(name: str, value: object) -> None:
    with pytest.raises(ApiError) as caught:
        check_fields({name: value}, CHAT_FIELDS, is_strict=False)
    assert caught.value.param == name


def test_ignored_fields_are_taken_without_a_word() -> None:
    body = {
        "user": "me",
        "safety_identifier": "me",
        "prompt_cache_retention": "24h",
        "session_id": "s",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "flex",
    }
    assert body.keys() == HARMLESS_FIELDS
    for served in (CHAT_FIELDS, COMPLETION_FIELDS):
        assert check_fields(body, served, is_strict=True) == []


def test_a_completion_has_no_tools() -> None:
    with pytest.raises(ApiError) as caught:
        check_fields({"tools": [{"type": "function"}]}, COMPLETION_FIELDS, is_strict=False)
    assert caught.value.param == "tools"


def test_a_field_that_moved_says_where_it_is_now() -> None:
    with pytest.raises(ApiError, match=r"use structured_outputs\.regex"):
        check_fields({"guided_regex": "a+"}, CHAT_FIELDS, is_strict=False)


def test_values_that_ask_for_nothing_are_taken() -> None:
    body = {name: neutral[0] for name, neutral in UNSERVED_FIELDS.items() if neutral}
    assert check_fields(body, CHAT_FIELDS, is_strict=True) == []


def test_null_is_taken_everywhere() -> None:
    body = dict.fromkeys([*UNSERVED_FIELDS, *HARMLESS_FIELDS, *CHAT_FIELDS, "unheard_of"])
    assert check_fields(body, CHAT_FIELDS, is_strict=True) == []


def test_unknown_fields_are_named_or_refused() -> None:
    body = {"bootstrap_host": "10.0.0.1", "user": "me"}
    assert check_fields(body, CHAT_FIELDS, is_strict=False) == ["bootstrap_host"]
    with pytest.raises(ApiError) as caught:
        check_fields(body, CHAT_FIELDS, is_strict=True)
    assert caught.value.param == "bootstrap_host"


def test_the_warnings_header_is_short_and_printable() -> None:
    header = warnings_header([f"ž\r\n{number}" + "x" * 500 for number in range(10_000)])
    assert header.isascii()
    assert header.isprintable()
    assert len(header) < 1024


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, (False, False, False)),
        ({"stream": None, "stream_options": None}, (False, False, False)),
        ({"stream": True}, (True, False, False)),
        ({"stream": True, "stream_options": {}}, (True, False, False)),
        ({"stream": True, "stream_options": {"include_usage": False}}, (True, False, False)),
        ({"stream": True, "stream_options": {"include_usage": True}}, (True, True, False)),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            (True, False, False),
        ),
        (
            {
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
            (True, True, True),
        ),
    ],
    ids=repr,
)
def test_usage_only_when_asked(body: dict[str, object], expected: tuple[bool, ...]) -> None:
    read = read_stream(body)
    assert (read.is_stream, read.has_usage_chunk, read.has_running_usage) == expected


@pytest.mark.parametrize(
    "body",
    [
        {"stream": "true"},
        {"stream": 1},
        {"stream_options": {}},
        {"stream": False, "stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": []},
        {"stream": True, "stream_options": {"include_usage": "yes"}},
    ],
    ids=repr,
)
def test_bad_stream_settings_are_400(body: dict[str, object]) -> None:
    with pytest.raises(ApiError) as caught:
        read_stream(body)
    assert caught.value.face.http_status == 400
