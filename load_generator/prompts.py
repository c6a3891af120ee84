"""Prompts of a given number of tokens; equal seeds give equal ones, to every server."""

import random
from collections.abc import Sequence
from typing import Any

# Each is one token with a space before it, in every vocabulary of some thousands of words.
_TEXT = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or "
    "had an they which one you were all her she there would their we him been has when who will no "
    "more if out so up said what its about than into them can only other time new some could these "
    "two may first then do any like my now over such our man me even most made after also did many"
)
WORDS = tuple(_TEXT.split())


class PromptMaker:
    """Makes prompts in the form a server takes."""

    def __init__(self, form: str, token_ids: tuple[int, int]) -> None:
        self._form = form
        self._low, self._high = token_ids

    def draw(self, num_tokens: int, rng: random.Random) -> list[Any]:
        """So many random tokens: ids, or words where text is sent."""
        if self._form == "ids":
            return [rng.randrange(self._low, self._high) for _ in range(num_tokens)]
        return rng.choices(WORDS, k=num_tokens)

    def fields(self, tokens: Sequence[Any]) -> dict[str, Any]:
        """The field of the body that carries them."""
        if self._form == "ids":
            return {"prompt": list(tokens)}
        text = " ".join(tokens)
        if self._form == "text":
            return {"prompt": text}
        return {"messages": [{"role": "user", "content": text}]}
