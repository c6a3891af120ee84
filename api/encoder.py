"""Text to token ids: by fastokens where it was seen to say what the tokenizers library says.

Both read the same files. fastokens takes a quarter of the time or less, but leaves rare settings
out, and where characters without a token become byte tokens it takes a spelled-out control token
for the token. So it is asked for byte-level tokenizers only, and for each of these it must first
agree on PROBES, with every added token of the tokenizer in them.
"""

import logging
from functools import cached_property
from typing import Final

import fastokens
from tokenizers import Tokenizer

from api.detokenizer import is_byte_level

# Tokenising this much takes under a millisecond: it is not worth a thread.
FAST_INLINE_CHARACTERS: Final = 4096
INLINE_CHARACTERS: Final = 2048

PROBES: Final = (
    "",
    " ",
    "The quick brown fox isn't over 1234567.89 lazy dogs, and they'LL've gone — home!?",
    "  def f(x):\n\treturn {'a': x[0] ** 2}  # 100%\r\n\r\n\n   \t end \n",
    "Příliš žluťoučký kůň, Ελληνικά, Русский, ﬁ Å e\u0301\u0308 ǅ ʼʰ ª²½Ⅷ٣",
    "你好世界。日本語のテスト 한국어 שלום مرحبا हिन्दी ไทย",
    "🦊🚀👨\u200d👩\u200d👧 \ufe0f\u200b\ufeff\u2028\u2029\u0085\u00a0\u2003\u3000x",
    "\0\x01\x1c\x1f\x7f\ue000\U000f0000\U0010ffff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa1111111111111111!!!!!!!!!!!!!!!!                 z",
)

_LOGGER = logging.getLogger(__name__)


class Encoder:
    """Owns the encoders of one tokenizer. Invariant: ids are those that tokenizers would give.

    Safe to use from several threads at once; other threads run meanwhile.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._fast: fastokens.Tokenizer | None = None
        if is_byte_level(backend):
            self._fast = self._tried()

    @property
    def is_fast(self) -> bool:
        """Whether fastokens answers."""
        return self._fast is not None

    @property
    def inline_characters(self) -> int:
        """How much text may be tokenised on an event loop."""
        return FAST_INLINE_CHARACTERS if self.is_fast else INLINE_CHARACTERS

    def encode(
        self, text: str, *, adds_special_tokens: bool = False, is_plain: bool = False
    ) -> list[int]:
        """Return the ids. With `is_plain` a special token in it is its characters only."""
        if self._fast is None:
            return self._encode_slowly(text, adds_special_tokens, is_plain)
        try:
            return self._encode_fast(self._fast, text, adds_special_tokens, is_plain)
        except ValueError:
            # A byte without a token: tokenizers leaves it out.
            return self._encode_slowly(text, adds_special_tokens, is_plain)

    @staticmethod
    def _encode_fast(
        fast: fastokens.Tokenizer, text: str, adds_special_tokens: bool, is_plain: bool
    ) -> list[int]:
        encoding = fast.encode(
            text, add_special_tokens=adds_special_tokens, split_special_tokens=is_plain
        )
        ids: list[int] = encoding.ids
        return ids

    def _encode_slowly(self, text: str, adds_special_tokens: bool, is_plain: bool) -> list[int]:
        tokenizer = self._plain if is_plain else self._backend
        # Of all ways to encode, those of batches alone let other threads run meanwhile, and this
        # one does not work out where in the text each token stands.
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=adds_special_tokens)
        return list(encoding.ids)

    @cached_property
    def _plain(self) -> Tokenizer:
        # encode_special_tokens is a setting of the whole object, so plain text gets its own one.
        plain = Tokenizer.from_str(self._backend.to_str())
        plain.encode_special_tokens = True
        return plain

    def _tried(self) -> fastokens.Tokenizer | None:
        """Return a tokenizer that agrees on all probes."""
        added = self._backend.get_added_tokens_decoder().values()
        if any(token.single_word for token in added):
            return None
        try:
            fast = fastokens.Tokenizer.from_json_str(self._backend.to_str())
        except ValueError as error:
            _LOGGER.info("Tokenising is left to tokenizers: %s", error)
            return None
        spelled = "".join(f"a{token.content}b {token.content}\n" for token in added)
        for text in (*PROBES, spelled):
            if not self._agree(fast, text):
                _LOGGER.info("Tokenising is left to tokenizers: they differ on %r", text[:64])
                return None
        return fast

    def _agree(self, fast: fastokens.Tokenizer, text: str) -> bool:
        try:
            for is_plain in (False, True):
                # Nobody else has the tokenizer yet: its setting may be changed for a moment.
                self._backend.encode_special_tokens = is_plain
                expected = self._backend.encode(text, add_special_tokens=not is_plain).ids
                if self._encode_fast(fast, text, not is_plain, is_plain) != expected:
                    return False
        except ValueError:
            pass  # as in `encode`
        finally:
            self._backend.encode_special_tokens = False
        return True
