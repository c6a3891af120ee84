"""The incremental detokenisers against the tokenizers' own full decode."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from api.detokenizer import (
    ByteLevelDetokenizer,
    DetokenizerFactory,
    WindowDetokenizer,
    detokenize,
    detokenizer_factory,
)
from tests.tiny_tokenizer import byte_fallback_backend, byte_level_backend

BYTE_LEVEL = byte_level_backend()
BYTE_FALLBACK = byte_fallback_backend()
BOTH = pytest.mark.parametrize("backend", [BYTE_LEVEL, BYTE_FALLBACK], ids=["level", "fallback"])


def ids_of(backend: Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, backend.get_vocab_size() - 1), max_size=40)


def pieces(factory: DetokenizerFactory, token_ids: list[int]) -> list[str]:
    detokenizer = factory()
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def test_each_kind_of_tokenizer_gets_its_detokenizer() -> None:
    assert isinstance(detokenizer_factory(BYTE_LEVEL)(), ByteLevelDetokenizer)
    assert isinstance(detokenizer_factory(BYTE_FALLBACK)(), WindowDetokenizer)


@settings(max_examples=300, deadline=None)
@given(token_ids=ids_of(BYTE_LEVEL))
def test_any_byte_level_ids_equal_the_full_decode(token_ids: list[int]) -> None:
    factory = detokenizer_factory(BYTE_LEVEL)
    assert "".join(pieces(factory, token_ids)) == BYTE_LEVEL.decode(token_ids)


@settings(max_examples=300, deadline=None)
@given(token_ids=ids_of(BYTE_FALLBACK))
def test_any_byte_fallback_ids_equal_the_full_decode(token_ids: list[int]) -> None:
    factory = detokenizer_factory(BYTE_FALLBACK)
    assert "".join(pieces(factory, token_ids)) == BYTE_FALLBACK.decode(token_ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_a_text_makes_the_round_trip_without_split_characters(text: str) -> None:
    factory = detokenizer_factory(BYTE_LEVEL)
    token_ids = BYTE_LEVEL.encode(text).ids
    parts = pieces(factory, token_ids)
    # Text may spell a special token, which shows as nothing.
    assert "".join(parts) == BYTE_LEVEL.decode(token_ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("text", ["🦊", "ž", "你", "e\u0301", "👩‍👩‍👧"])
@BOTH
def test_an_unfinished_character_is_held_back(backend: Tokenizer, text: str) -> None:
    factory = detokenizer_factory(backend)
    token_ids = backend.encode(text, add_special_tokens=False).ids
    parts = pieces(factory, token_ids)
    assert "".join(parts) == backend.decode(token_ids)
    assert not any("\ufffd" in part for part in parts)


def test_a_text_cut_inside_a_character_ends_like_the_full_decode() -> None:
    lead_byte = BYTE_LEVEL.token_to_id("ð")  # 0xF0
    factory = detokenizer_factory(BYTE_LEVEL)
    assert pieces(factory, [lead_byte]) == ["", "\ufffd"]


def test_special_tokens_do_not_show() -> None:
    factory = detokenizer_factory(BYTE_LEVEL)
    token_ids = [1, *BYTE_LEVEL.encode("hi").ids, 2]
    assert detokenize(factory, token_ids) == "hi"


def test_an_added_token_with_a_space_shows_as_itself() -> None:
    factory = detokenizer_factory(BYTE_LEVEL)
    token_ids = BYTE_LEVEL.encode("a<tool call>b").ids
    assert detokenize(factory, token_ids) == BYTE_LEVEL.decode(token_ids) == "a<tool call>b"


def test_ids_the_tokenizer_does_not_know_show_as_nothing() -> None:
    factory = detokenizer_factory(BYTE_LEVEL)
    assert detokenize(factory, [100_000, *BYTE_LEVEL.encode("x").ids, 99_999]) == "x"


def test_two_requests_share_nothing() -> None:
    factory = detokenizer_factory(BYTE_LEVEL)
    first, second = factory(), factory()
    first.push(BYTE_LEVEL.token_to_id("ð"))
    assert second.push(BYTE_LEVEL.token_to_id("a")) == "a"
