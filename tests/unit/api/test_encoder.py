"""Whichever library tokenises, the ids are those of tokenizers."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors

from api.encoder import PROBES, Encoder
from tests.tiny_tokenizer import SPECIAL_TOKENS, byte_fallback_backend, byte_level_backend

# How Llama 3, and but for the digits Qwen, take a text apart.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def llama_3() -> Tokenizer:
    backend = byte_level_backend()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


def qwen() -> Tokenizer:
    backend = llama_3()
    backend.normalizer = normalizers.NFC()
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return backend


def digits_apart() -> Tokenizer:
    """SmolLM's way."""
    backend = byte_level_backend()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return backend


MADE: dict[str, tuple[Tokenizer, Encoder]] = {}


def pair(make: Callable[[], Tokenizer]) -> tuple[Tokenizer, Encoder]:
    """A tokenizer and its encoder, made once."""
    if make.__name__ not in MADE:
        backend = make()
        MADE[make.__name__] = backend, Encoder(backend)
    return MADE[make.__name__]


PIECES = [
    *SPECIAL_TOKENS,
    "<tool call>",
    "<think>",
    "'s",
    "'LL",
    " ",
    "  ",
    "\n",
    "\r\n",
    "e\u0301",
]
TEXTS = st.lists(
    st.sampled_from([*PIECES, *PROBES]) | st.text(max_size=8) | st.text("ab 1!'\n\t", max_size=8),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("make", [byte_level_backend, llama_3, qwen, digits_apart])
@given(text=TEXTS, is_plain=st.booleans())
def test_the_fast_way_gives_the_same_ids(
    make: Callable[[], Tokenizer], text: str, is_plain: bool
) -> None:
    backend, encoder = pair(make)
    assert encoder.is_fast
    assert encoder.encode(text, is_plain=is_plain) == reference(backend, text, is_plain=is_plain)


def reference(backend: Tokenizer, text: str, *, is_plain: bool) -> list[int]:
    backend.encode_special_tokens = is_plain
    try:
        return list(backend.encode(text, add_special_tokens=False).ids)
    finally:
        backend.encode_special_tokens = False


@pytest.mark.parametrize("text", ["a</s>b", "<unk>", "<s>the</s>", "the é 🦊 <0x0A>"])
@pytest.mark.parametrize("is_plain", [False, True])
def test_byte_tokens_are_left_to_tokenizers(text: str, is_plain: bool) -> None:
    """There fastokens would take control tokens that a client spells for the tokens."""
    backend, encoder = pair(byte_fallback_backend)
    assert not encoder.is_fast
    assert encoder.encode(text, is_plain=is_plain) == reference(backend, text, is_plain=is_plain)


def single_words() -> Tokenizer:
    backend = byte_level_backend()
    backend.add_tokens([AddedToken("hello", single_word=True, normalized=False)])
    return backend


@pytest.mark.parametrize("text", ["hello", "othello", "hello<|im_end|>hello", "hello_"])
def test_tokens_that_must_be_whole_words_are_left_to_tokenizers(text: str) -> None:
    backend, encoder = pair(single_words)
    assert not encoder.is_fast
    assert encoder.encode(text) == reference(backend, text, is_plain=False)


def without_a_byte() -> Tokenizer:
    """A vocabulary that lacks byte 0xF2, as SmolLM's does."""
    return Tokenizer.from_str(llama_3().to_str().replace('"ò":', '"òò":'))


@pytest.mark.parametrize("text", ["a\U000bad8cb", "\U000bad8c", "ab"])
def test_a_byte_without_a_token_is_left_out(text: str) -> None:
    backend, encoder = pair(without_a_byte)
    assert encoder.is_fast
    assert encoder.encode(text) == reference(backend, text, is_plain=False)


def test_what_the_tokenizer_always_adds_is_added() -> None:
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    encoder = Encoder(backend)
    assert encoder.is_fast
    assert encoder.encode("hi", adds_special_tokens=True) == [1, *encoder.encode("hi")]
    assert encoder.encode("", adds_special_tokens=True) == [1]
