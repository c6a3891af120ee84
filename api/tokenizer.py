"""Text to token ids and back, for the one served model."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer as BackendTokenizer
from transformers import PreTrainedTokenizerFast

from api import detokenizer
from api.chat.conversation import Conversation
from api.chat.template import ChatTemplate, opens_thought
from api.detokenizer import Detokenizer
from api.encoder import Encoder
from api.errors import ApiError, Verdict
from api.parsers.reading import Dialect
from api.token_text import token_bytes_of

# Real text has about four characters a token; what has more than this many cannot be meant.
MAX_CHARACTERS_PER_TOKEN = 16
MIN_CHARACTER_BOUND = 4096

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered chat."""

    token_ids: list[int]
    opens_thought: bool  # it ends where the model begins to think


class Tokenizer:
    """Owns the tokenizer files of one model. Safe to use from several tasks at once."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, vocab_size: int) -> None:
        self._backend: BackendTokenizer = tokenizer.backend_tokenizer
        self.vocab_size = vocab_size
        # Some files say at what length to cut a text. A prompt is refused or whole.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._encoder = Encoder(self._backend)
        added = self._backend.get_added_tokens_decoder().values()
        self._template = ChatTemplate(
            tokenizer, [token.content for token in added if token.special]
        )
        self._new_detokenizer = detokenizer.detokenizer_factory(self._backend)
        # For chats whose structure control tokens carry: a parser has to see those.
        marks = self.dialect.marks & {token.content for token in added if token.special}
        self._new_chat_detokenizer = (
            detokenizer.detokenizer_factory(self._backend, shown=marks)
            if marks
            else self._new_detokenizer
        )
        self.token_bytes = token_bytes_of(self._backend)

    @classmethod
    def load(cls, path: str) -> "Tokenizer":
        """Read a checkpoint directory; ValueError when it has no fast tokenizer."""
        folder = Path(path)
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(f"Got {path = } but expected a directory with tokenizer.json")
        # Not AutoTokenizer: it imports torch, which has no place in this process.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        return cls(tokenizer, vocab_size=_vocab_size(folder, default=len(tokenizer)))

    @property
    def dialect(self) -> Dialect:
        """How the model writes thoughts and calls, as its chat template tells."""
        return self._template.dialect

    def new_detokenizer(self, *, is_parsed: bool = False) -> Detokenizer:
        """Return a detokenizer for one request; `is_parsed`: a chat whose text will be read."""
        return self._new_chat_detokenizer() if is_parsed else self._new_detokenizer()

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the whole text of some ids, without special tokens."""
        return detokenizer.detokenize(self._new_detokenizer, token_ids)

    def encode_word(self, text: str) -> list[int]:
        """Tokenise a piece of text as it may stand anywhere; nothing in it is a special token."""
        return self._encoder.encode(text, is_plain=True)

    async def encode(
        self,
        text: str,
        *,
        max_model_len: int,
        has_special_tokens: bool = True,
    ) -> list[int]:
        """Tokenise a bare prompt; the tokenizer adds what it always adds (BOS), or nothing."""
        check_length(len(text), max_model_len, "prompt")
        return await self._run(
            lambda: self._encoder.encode(text, adds_special_tokens=has_special_tokens), len(text)
        )

    async def encode_chat(self, chat: Conversation, *, max_model_len: int) -> "ChatPrompt":
        """Render and tokenise a chat."""
        num_characters = chat.num_characters
        check_length(num_characters, max_model_len, "messages")
        cost = num_characters + 64 * len(chat.messages)
        return await self._run(lambda: self._encode_chat(chat), cost)

    def _encode_chat(self, chat: Conversation) -> "ChatPrompt":
        pieces = self._template.render(chat)
        token_ids: list[int] = []
        for piece in pieces:
            token_ids += self._encoder.encode(piece.text, is_plain=piece.is_plain)
        is_open = bool(pieces) and not pieces[-1].is_plain and opens_thought(pieces[-1].text)
        return ChatPrompt(token_ids, is_open)

    async def _run(self, encode: Callable[[], T], num_characters: int) -> T:
        is_short = num_characters <= self._encoder.inline_characters
        # The interpreter is free meanwhile, so a thread helps.
        return encode() if is_short else await asyncio.to_thread(encode)


def check_length(num_characters: int, max_model_len: int, name: str) -> None:
    """Refuse by length alone what could never fit, before it costs tokenising."""
    bound = max(MIN_CHARACTER_BOUND, MAX_CHARACTERS_PER_TOKEN * max_model_len)
    if num_characters > bound:
        raise ApiError(
            Verdict.CONTEXT_LENGTH,
            f"{name} has {num_characters} characters, far more than the context of "
            f"{max_model_len} tokens can hold; shorten it",
            param=name,
        )


def _vocab_size(folder: Path, *, default: int) -> int:
    """Read how many ids the model has rows for: a tokenizer may know more of them."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        return default
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return size if isinstance(size, int) else default
