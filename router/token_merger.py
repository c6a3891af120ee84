"""Makes one stream of tokens out of two, by absolute position.

    prompt              output
    [0 ........... n)   [n] from the prefill worker, [n, ...) or [n + 1, ...) from the decode worker

What was delivered before is dropped; what comes too early waits for as long as another stream may
still fill the gap.
"""

from collections.abc import Sequence


class TokenGapError(Exception):
    """A worker skipped tokens, or repeated them differently."""


class TokenMerger:
    """The output of one request so far. Invariant: `output` only grows, without gap or repeat."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.output: list[int] = []
        self._early: list[tuple[int, list[int]]] = []

    @property
    def position(self) -> int:
        """Absolute position of the next token."""
        return self.num_prompt_tokens + len(self.output)

    @property
    def has_early(self) -> bool:
        """Whether tokens wait behind a gap."""
        return bool(self._early)

    def start_attempt(self) -> None:
        """What an ended attempt left behind a gap means nothing to the next."""
        self._early.clear()

    def add(self, start: int, token_ids: Sequence[int], *, may_wait: bool) -> list[int]:
        """Return the tokens that are new now, in order."""
        if not token_ids:
            return []
        if start > self.position:
            if not may_wait:
                raise TokenGapError(f"Got tokens from {start} but expected {self.position}")
            self._early.append((start, list(token_ids)))
            return []
        added = self._append(start, token_ids)
        while self._early and self._early[0][0] <= self.position:
            added += self._append(*self._early.pop(0))
        return added

    def close_gap(self) -> None:
        """No other stream is left that could fill a gap."""
        if self._early:
            raise TokenGapError(f"Tokens from {self.position} to {self._early[0][0]} never came")

    def _append(self, start: int, token_ids: Sequence[int]) -> list[int]:
        begin = start - self.num_prompt_tokens
        if begin < 0:
            raise TokenGapError(f"Got a token at {start}, inside the prompt")
        num_known = min(len(self.output) - begin, len(token_ids))
        if list(token_ids[:num_known]) != self.output[begin : begin + num_known]:
            raise TokenGapError(f"Tokens from {start} were repeated differently")
        added = list(token_ids[num_known:])
        self.output += added
        return added
