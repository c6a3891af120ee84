"""What one token looks like by itself, special tokens too."""

from collections.abc import Callable

from tokenizers import Tokenizer

from api.detokenizer import byte_characters, is_byte_level, is_byte_token

TokenBytes = Callable[[int], bytes]

_SPACE = "\u2581"  # how sentencepiece writes a space


def token_bytes_of(tokenizer: Tokenizer) -> TokenBytes:
    """Return the function that gives a token's bytes; empty for an id without a token."""
    if is_byte_level(tokenizer):
        characters = byte_characters()
        added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}

        def byte_level(token_id: int) -> bytes:
            if token_id in added:
                return added[token_id].encode()
            token = tokenizer.id_to_token(token_id) or ""
            return bytes([characters[character] for character in token])

        return byte_level

    def plain(token_id: int) -> bytes:
        token = tokenizer.id_to_token(token_id) or ""
        if is_byte_token(token):
            return bytes([int(token[3:5], 16)])
        return token.replace(_SPACE, " ").encode()

    return plain


def token_text(token: bytes) -> str:
    """Return a token's text; what is not a whole character shows as a replacement."""
    return token.decode("utf-8", "replace")
