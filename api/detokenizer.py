"""Token ids to text, piece by piece, without ever splitting a character.

Two ways, by the tokenizer's own decoder: byte-level tokenizers (GPT-2, Llama 3, Qwen, SmolLM) map
each token to bytes, so an incremental UTF-8 decoder is exact and costs the same for every token;
all others decode a small moving window of tokens.
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from tokenizers import Tokenizer, decoders

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """One request's tokens to text: all pushes and the flush joined equal the full decode."""

    def push(self, token_id: int) -> str:
        """Take a token and return the text that is whole now."""
        ...

    def flush(self) -> str:
        """Return the rest: the tokens are over."""
        ...


class DetokenizerFactory(Protocol):
    """Makes a fresh detokenizer for each request."""

    def __call__(self) -> Detokenizer:
        """Return a detokenizer at the start of a text."""
        ...


class ByteLevelDetokenizer:
    """Exact for byte-level tokenizers. Invariant: the held bytes are the start of one character."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Take a token and return the text that is whole now."""
        if not 0 <= token_id < len(self._token_bytes):
            return ""
        return self._decoder.decode(self._token_bytes[token_id])

    def flush(self) -> str:
        """Return what an unfinished character amounts to."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For every other decoder: the text of a token is what it adds to the tokens before it.

    Held back: an unfinished character, and a run of byte tokens, whose text depends on all of it.
    """

    def __init__(
        self, tokenizer: Tokenizer, skipped_ids: frozenset[int], byte_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = skipped_ids
        self._byte_ids = byte_ids
        self._window: list[int] = []
        self._num_shown = 0  # tokens of the window whose text is out

    def push(self, token_id: int) -> str:
        """Take a token and return the text that is whole now."""
        if token_id in self._skipped_ids:
            return ""
        self._window.append(token_id)
        return "" if token_id in self._byte_ids else self._advance(is_last=False)

    def flush(self) -> str:
        """Return the text of the tokens still held."""
        return self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> str:
        shown = self._decode(self._window[: self._num_shown])
        text = self._decode(self._window)
        if not is_last and (text.endswith(REPLACEMENT) or len(text) <= len(shown)):
            return ""
        self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        return text[len(shown) :]

    def _decode(self, token_ids: list[int]) -> str:
        # Which special tokens have no text was decided before they came here.
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


def detokenizer_factory(
    tokenizer: Tokenizer, *, shown: frozenset[str] = frozenset()
) -> DetokenizerFactory:
    """Choose by the tokenizer's own decoder; tables are built once.

    Special tokens have no text, but for those to be `shown`.
    """
    added = tokenizer.get_added_tokens_decoder()
    skipped_ids = frozenset(
        token_id
        for token_id, token in added.items()
        if token.special and token.content not in shown
    )
    if is_byte_level(tokenizer):
        token_bytes = _byte_table(tokenizer, skipped_ids)
        return lambda: ByteLevelDetokenizer(token_bytes)
    byte_ids = frozenset(
        token_id for token, token_id in tokenizer.get_vocab().items() if is_byte_token(token)
    )
    return lambda: WindowDetokenizer(tokenizer, skipped_ids, byte_ids)


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Tell whether each token stands for some bytes."""
    return isinstance(tokenizer.decoder, decoders.ByteLevel)


def detokenize(factory: DetokenizerFactory, token_ids: Iterable[int]) -> str:
    """Decode a whole text at once."""
    detokenizer = factory()
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    return "".join([*pieces, detokenizer.flush()])


def _byte_table(tokenizer: Tokenizer, skipped_ids: frozenset[int]) -> list[bytes]:
    characters = byte_characters()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        if token_id in skipped_ids:
            continue
        try:
            table[token_id] = bytes([characters[character] for character in token])
        except KeyError:
            # An added token is written as itself when a character of it stands for no byte.
            table[token_id] = token.encode()
    return table


def byte_characters() -> dict[str, int]:
    """Map each character of the byte-level alphabet to its byte (GPT-2's printable stand-ins)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + rank): byte for rank, byte in enumerate(others)}


def is_byte_token(token: str) -> bool:
    """Tell whether a token of a sentencepiece vocabulary stands for one byte."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")
