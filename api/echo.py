"""A prompt as the start of its answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from api.detokenizer import Detokenizer
from api.scored_tokens import ScoredToken
from router.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt's text, and where each of its tokens begins in it, in characters."""

    text: str
    token_ids: Sequence[int]
    offsets: Sequence[int]

    @classmethod
    def of(cls, token_ids: Sequence[int], text: str | None, detokenizer: Detokenizer) -> "Echo":
        """Lay a prompt out; without the client's own text its tokens say it."""
        offsets: list[int] = []
        pieces: list[str] = []
        num_characters = 0
        for token_id in token_ids:
            offsets.append(num_characters)
            pieces.append(detokenizer.push(token_id))
            num_characters += len(pieces[-1])
        if text is None:
            text = "".join([*pieces, detokenizer.flush()])
        return cls(text, token_ids, [min(offset, len(text)) for offset in offsets])

    def score(self, entries: Sequence[TokenLogprobs], num_top: int) -> list[ScoredToken]:
        """Join tokens and logprobs; none at all where those did not come."""
        if len(entries) != len(self.token_ids) - 1:
            return []
        places = zip(self.token_ids, self.offsets, [None, *entries], strict=True)
        return [ScoredToken(i, offset, trimmed(entry, num_top)) for i, offset, entry in places]


def trimmed(entry: TokenLogprobs | None, num_top: int) -> TokenLogprobs | None:
    """Leave as many candidates as were asked for."""
    if entry is None or len(entry.top) <= num_top:
        return entry
    return TokenLogprobs(entry.logprob, entry.rank, entry.top[:num_top])
