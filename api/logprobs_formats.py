"""Logprobs in the shapes of OpenAI's two APIs and of vLLM's `prompt_logprobs`."""

from collections.abc import Sequence

from api.scored_tokens import ScoredToken
from api.token_text import TokenBytes, token_text
from router.logprobs import TokenLogprobs

Json = dict[str, object]

# JSON has no infinity; this is what other servers write for "never".
MIN_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    """Return a number JSON can hold."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def chat_logprobs(tokens: Sequence[ScoredToken], token_bytes: TokenBytes) -> Json:
    """Return `choice.logprobs` of a chat."""
    return {
        "content": [
            {
                **_chat_entry(token_bytes(token.token_id), token.logprobs.logprob),
                "top_logprobs": [
                    _chat_entry(token_bytes(token_id), logprob)
                    for token_id, logprob in token.logprobs.top
                ],
            }
            for token in tokens
            if token.logprobs is not None
        ],
        "refusal": None,
    }


def _chat_entry(token: bytes, logprob: float) -> Json:
    return {"token": token_text(token), "logprob": finite(logprob), "bytes": list(token)}


def completion_logprobs(tokens: Sequence[ScoredToken], token_bytes: TokenBytes) -> Json:
    """Return `choice.logprobs` of a completion; the first token of an echoed prompt has null."""
    texts = [token_text(token_bytes(token.token_id)) for token in tokens]
    return {
        "text_offset": [token.text_offset for token in tokens],
        "token_logprobs": [
            None if token.logprobs is None else finite(token.logprobs.logprob) for token in tokens
        ],
        "tokens": texts,
        "top_logprobs": [
            None if token.logprobs is None else _candidates(text, token.logprobs, token_bytes)
            for text, token in zip(texts, tokens, strict=True)
        ],
    }


def _candidates(text: str, logprobs: TokenLogprobs, token_bytes: TokenBytes) -> Json:
    """The likeliest tokens, and the chosen one even when it is not among them."""
    candidates: Json = {}
    for token_id, logprob in logprobs.top:
        # Two tokens may look the same; the likelier one counts.
        candidates.setdefault(token_text(token_bytes(token_id)), finite(logprob))
    candidates.setdefault(text, finite(logprobs.logprob))
    return candidates


def prompt_logprobs(
    prompt: Sequence[int], entries: Sequence[TokenLogprobs], token_bytes: TokenBytes
) -> list[Json | None]:
    """Return one object by token id for each token of the prompt; null for the first."""
    answer: list[Json | None] = [None]
    for token_id, entry in zip(prompt[1:], entries, strict=True):
        candidates = {
            top_id: (logprob, rank) for rank, (top_id, logprob) in enumerate(entry.top, start=1)
        }
        candidates[token_id] = (entry.logprob, entry.rank)
        answer.append(
            {
                str(each): {
                    "logprob": finite(logprob),
                    "rank": rank,
                    "decoded_token": token_text(token_bytes(each)),
                }
                for each, (logprob, rank) in candidates.items()
            }
        )
    return answer
