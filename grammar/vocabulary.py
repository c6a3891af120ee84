"""What a grammar has to know of a model: its tokens as text, and which of them end one."""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens of one model."""

    tokenizer_json: str  # as in tokenizer.json, without padding and truncation
    vocab_size: int  # rows of the model's logits; may be more or fewer than the tokenizer's
    eos_token_ids: tuple[int, ...]


def load_vocabulary(
    path: str, *, vocab_size: int | None = None, eos_token_ids: tuple[int, ...] | None = None
) -> Vocabulary:
    """Read a checkpoint directory; ValueError when it has no fast tokenizer, or no end of text.

    What the caller does not know is read from the checkpoint's own settings.
    """
    folder = Path(path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"Got {path = } but expected a directory with tokenizer.json")
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if vocab_size is None:
        vocab_size = _vocab_size(folder) or tokenizer.get_vocab_size(with_added_tokens=True)
    if eos_token_ids is None:
        eos_token_ids = _eos_token_ids(folder, tokenizer)
    if not eos_token_ids:
        raise ValueError(f"Got {path = } but expected a model with an end-of-sequence token")
    return Vocabulary(
        tokenizer_json=tokenizer.to_str(), vocab_size=vocab_size, eos_token_ids=eos_token_ids
    )


def _vocab_size(folder: Path) -> int | None:
    config = _read(folder / "config.json")
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return size if isinstance(size, int) else None


def _eos_token_ids(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        found = _read(folder / name).get("eos_token_id")
        if isinstance(found, int):
            return (found,)
        if isinstance(found, list):
            return tuple(found)
    token = _read(folder / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    token_id = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return () if token_id is None else (token_id,)


def _read(file: Path) -> dict:  # type: ignore[type-arg]  # whatever the checkpoint says
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    return content if isinstance(content, dict) else {}
