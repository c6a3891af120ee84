"""Tokens of an answer with their probabilities, told when their text is."""

from collections import deque
from dataclasses import dataclass

from router.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One token, and where in the answer's text it begins."""

    token_id: int
    text_offset: int  # in characters
    logprobs: TokenLogprobs | None  # None: the first token of a prompt has none


class ScoredTokens:
    """Holds tokens back until all of their text is out. Invariant: in order, each told once."""

    def __init__(self) -> None:
        self._held: deque[tuple[int, ScoredToken]] = deque()  # with where its text ends

    def push(self, token: ScoredToken, *, end: int) -> None:
        """Take a token whose text ends at this character, not yet known to be out."""
        # A token that brought no character yet is part of the next one.
        self._held.append((max(end, token.text_offset + 1), token))

    def release(self, num_shown: int) -> list[ScoredToken]:
        """Return the tokens whose text is among the first `num_shown` characters."""
        released: list[ScoredToken] = []
        while self._held and self._held[0][0] <= num_shown:
            released.append(self._held.popleft()[1])
        return released

    def flush(self) -> list[ScoredToken]:
        """Return the rest: the text is over."""
        released = [token for _, token in self._held]
        self._held.clear()
        return released
