"""Thoughts, content and calls out of text, however it is cut."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.parsers.part import Part, PartKind, join_parts, text_of
from api.parsers.reading import Dialect, Reading

HERMES = Reading(dialect=Dialect.of("<tool_call> tools"), names={"f", "g"})
LLAMA = Reading(dialect=Dialect.of("<|python_tag|> tools"), names={"f", "g"})
MISTRAL = Reading(dialect=Dialect.of("[TOOL_CALLS] tools"), names={"f", "g"})
NAMED = Reading(dialect=Dialect.of("[TOOL_CALLS] [ARGS]"), names={"f", "g"})
HARMONY = Reading(dialect=Dialect.of("<|channel|>"), names={"f"})
QWEN = Reading(dialect=Dialect.of("<tool_call> tools </think>"), names={"f", "g"})
OPEN = Reading(dialect=Dialect.of("</think>"), is_thinking=True)
ENFORCED = Reading(dialect=Dialect.of(""), names={"f", "g"}, is_enforced=True)

Told = list[tuple[str, str]]

CASES: list[tuple[Reading, str, Told]] = [
    (HERMES, "plain text\n", [("content", "plain text\n")]),
    (HERMES, "", []),
    (
        HERMES,
        'Look:\n<tool_call>\n{"name": "f", "arguments": {"a": "}<x>", "b": [1, {"c": 2}]}}\n'
        "</tool_call>",
        [("content", "Look:"), ("f", '{"a": "}<x>", "b": [1, {"c": 2}]}')],
    ),
    (
        HERMES,
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>\n'
        '<tool_call>{"name": "g"}</tool_call> and so on',
        [("f", '{"a": 1}'), ("g", "{}"), ("content", " and so on")],
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "cu', [("f", '{"a": "cu')]),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>',
        [("f", '{"a": 1}')],
    ),
    (HERMES, "<tool_call>nonsense", [("content", "<tool_call>nonsense")]),
    (HERMES, '<tool_call>{"nam', [("content", '<tool_call>{"nam')]),
    (HERMES, "1 < 2 <tool", [("content", "1 < 2 <tool")]),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}</tool_call>',
        [("f", '{"a": "é"}')],
    ),
    (LLAMA, '{"name": "f", "parameters": {"x": 1}}', [("f", '{"x": 1}')]),
    (
        LLAMA,
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"y": 2}}',
        [("f", "{}"), ("g", '{"y": 2}')],
    ),
    (LLAMA, ' {"name": "Bob", "age": 3} is it', [("content", ' {"name": "Bob", "age": 3} is it')]),
    (LLAMA, '{"age": 3}', [("content", '{"age": 3}')]),
    (LLAMA, "Hi {}", [("content", "Hi {}")]),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (MISTRAL, "a [list]", [("content", "a [list]")]),
    (
        NAMED,
        'Sure.[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]g{"b": 2}',
        [("content", "Sure."), ("f", '{"a": 1}'), ("g", '{"b": 2}')],
    ),
    (
        HARMONY,
        "<|channel|>analysis<|message|>hm <|end|><|start|>assistant<|channel|>commentary "
        'to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        [("reasoning", "hm "), ("f", '{"a": 1}')],
    ),
    (
        HARMONY,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi <|",
        [("reasoning", "hm"), ("content", "Hi <|")],
    ),
    (HARMONY, "no channels", [("content", "no channels")]),
    (
        QWEN,
        '<think>\nhm <tool_call>\n</think>\n\nHi.\n<tool_call>{"name": "f", "arguments": {}}',
        [("reasoning", "hm <tool_call>"), ("content", "Hi."), ("f", "{}")],
    ),
    (QWEN, "<thin", [("content", "<thin")]),
    (QWEN, "<think>\n\n</think>\n\nHi", [("content", "Hi")]),
    (OPEN, "hm\n</think>\n\nHi", [("reasoning", "hm"), ("content", "Hi")]),
    (OPEN, "hm </thin", [("reasoning", "hm </thin")]),
    (
        ENFORCED,
        '[ {"name": "f", "arguments": {"a": 1}},\n{"name":"g","arguments":{}}]',
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
]


def read(reading: Reading, pieces: Sequence[str]) -> list[Part]:
    parser = reading.new_parser()
    parts = [part for piece in pieces for part in parser.push(piece)]
    return join_parts([*parts, *parser.flush()])


def told(parts: list[Part]) -> Told:
    return [(part.name or part.kind.value, part.text) for part in parts]


@pytest.mark.parametrize(("reading", "text", "expected"), CASES, ids=lambda each: repr(each)[:40])
def test_parts_do_not_depend_on_how_the_text_is_cut(
    reading: Reading, text: str, expected: Told
) -> None:
    assert told(read(reading, [text])) == expected
    assert told(read(reading, list(text))) == expected
    for size in (2, 3, 7):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert told(read(reading, pieces)) == expected


READINGS = [HERMES, LLAMA, MISTRAL, NAMED, HARMONY, QWEN, OPEN, ENFORCED]
WORDS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[", "]"),
    *("<|python_tag|>", ";", "<|channel|>", "<|message|>", "<|end|>", "final", "to=functions.f"),
    *('{"name": "f", "arguments": {}}', '{"name": "f"', "{", "}", '"', ",", " ", "\n", "x", "é"),
]


@settings(max_examples=300, deadline=None)
@given(
    reading=st.sampled_from(READINGS),
    words=st.lists(st.sampled_from(WORDS), max_size=12),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_any_text_reads_the_same_in_any_pieces(
    reading: Reading, words: list[str], sizes: list[int]
) -> None:
    text = "".join(words)
    pieces, start = [], 0
    while start < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[start : start + size])
        start += size
    assert told(read(reading, pieces)) == told(read(reading, [text]))


def test_each_call_begins_once_with_its_name_and_a_fresh_id() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' * 3
    parser = HERMES.new_parser()
    parts = [part for letter in text for part in parser.push(letter)]
    begun = [part for part in parts if part.begins_call]
    assert [(part.call_index, part.name) for part in begun] == [(0, "f"), (1, "f"), (2, "f")]
    assert len({part.call_id for part in begun}) == 3
    assert len(parts) > 10, "arguments are streamed"


def test_mistral_s_ids_have_the_nine_letters_its_template_wants() -> None:
    (part,) = read(MISTRAL, ['[TOOL_CALLS][{"name": "f", "arguments": {}}]'])
    assert len(part.call_id) == 9
    assert part.call_id.isalnum()


def test_only_the_first_call_counts_where_calls_may_not_be_parallel() -> None:
    one = Reading(dialect=HERMES.dialect, names={"f"}, is_parallel=False)
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' * 2
    assert told(read(one, [text])) == [("f", '{"a": 1}')]


def test_arguments_come_out_as_they_were_written() -> None:
    arguments = {"text": 'a "quoted" \\ \n <tool_call> é 🦊', "list": [1, [2, {"x": None}]]}
    for text in (json.dumps(arguments), json.dumps(arguments, ensure_ascii=False, indent=2)):
        call = f'<tool_call>{{"name": "f", "arguments": {text}}}</tool_call>'
        (part,) = read(HERMES, list(call))
        assert part.text == text


def test_thoughts_are_known_while_they_last() -> None:
    parser = QWEN.new_parser()
    parser.push("<think>hm")
    assert parser.is_reasoning
    parts = parser.push("</think>so")
    assert not parser.is_reasoning
    assert text_of(parts, PartKind.CONTENT) == "so"
