"""Reads the parameters that speak of single tokens: ids, biases, words that must not come."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from api.errors import invalid, show
from api.parameter_checks import MAX_STOP_TOKEN_IDS, Values, read_token_ids

MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 128
MAX_BIAS = 100.0

EncodeWord = Callable[[str], Sequence[int]]

_INTEGER = re.compile(r"-?[0-9]{1,19}", re.ASCII)


def read_stop_token_ids(values: Values, vocab_size: int) -> tuple[int, ...]:
    """Read ids that end the text."""
    value = values.get("stop_token_ids")
    if value is None:
        return ()
    return tuple(
        read_token_ids(value, "stop_token_ids", vocab_size=vocab_size, max_ids=MAX_STOP_TOKEN_IDS)
    )


def read_allowed_token_ids(values: Values, vocab_size: int) -> tuple[int, ...]:
    """Read the only ids that may come; empty when all may."""
    name = "allowed_token_ids"
    value = values.get(name)
    if value is None:
        return ()
    token_ids = tuple(read_token_ids(value, name, vocab_size=vocab_size, max_ids=vocab_size))
    if not token_ids:
        raise invalid(f"{name} is empty, so that no token may come; leave it out", name)
    return token_ids


def read_logit_bias(values: Values, vocab_size: int) -> dict[int, float]:
    """Read token id -> bias; JSON writes the ids as strings."""
    name = "logit_bias"
    value = values.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid(f"{name} must be an object of token ids and numbers, got {show(value)}", name)
    if len(value) > MAX_LOGIT_BIASES:
        raise invalid(
            f"{name} must have at most {MAX_LOGIT_BIASES} entries, got {len(value)}", name
        )
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if isinstance(key, str) and not _INTEGER.fullmatch(key):
            raise invalid(f"{name} must have token ids as keys, got {show(key)}", name)
        token_id = int(key)
        if not 0 <= token_id < vocab_size:
            raise invalid(
                f"{name} must have token ids from 0 to {vocab_size - 1}, got {token_id}", name
            )
        biases[token_id] = _read_bias(bias)
    return biases


def _read_bias(bias: Any) -> float:
    is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
    if not is_number or not -MAX_BIAS <= bias <= MAX_BIAS:  # NaN is in no interval
        name = "logit_bias"
        raise invalid(f"{name} must have values from -100 to 100, got {show(bias)}", name)
    return float(bias)


def read_bad_words(values: Values, encode: EncodeWord) -> tuple[tuple[int, ...], ...]:
    """Read words and return the token sequences that spell them, alone and after a space."""
    name = "bad_words"
    words = values.get(name)
    if words is None:
        return ()
    if not isinstance(words, list) or len(words) > MAX_BAD_WORDS:
        raise invalid(f"{name} must be a list of at most {MAX_BAD_WORDS} strings", name)
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        is_word = isinstance(word, str) and len(word) <= MAX_BAD_WORD_CHARACTERS
        if not is_word or not word.strip(" "):
            raise invalid(
                f"{name} must hold strings of 1 to {MAX_BAD_WORD_CHARACTERS} characters, not only "
                f"spaces, got {show(word)}",
                name,
            )
        bare = word.lstrip(" ")
        for spelled in (tuple(encode(bare)), tuple(encode(" " + bare))):
            if spelled:
                sequences[spelled] = None
    return tuple(sequences)


def check_something_is_left(
    allowed: Sequence[int], bad_words: Sequence[Sequence[int]], end_token_ids: Sequence[int]
) -> None:
    """Refuse allowed tokens that other parameters forbid from the first one on.

    `end_token_ids` are those that may not come at first, because of min_tokens.
    """
    if not allowed:
        return
    forbidden = {word[0] for word in bad_words if len(word) == 1} | set(end_token_ids)
    if forbidden.issuperset(allowed):
        name = "allowed_token_ids"
        raise invalid(
            f"{name} holds only tokens that bad_words, or min_tokens with what ends a text, forbid",
            name,
        )
