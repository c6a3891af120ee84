"""Makes one stream of a choice's tokens out of two, by absolute position.

    prompt              output
    [0 ........... n)   [n] from the prefill worker, [n, ...) or [n + 1, ...) from the decode worker

What was delivered before is dropped; what comes too early waits for as long as another stream may
still fill the gap. Logprobs go with their tokens. Those of the prompt come before the first token,
in pieces, and it waits for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from router.logprobs import TokenLogprobs
from router.request import FinishReason, RoutedRequest, TokenBatch


class TokenGapError(Exception):
    """A worker skipped tokens, or repeated them differently."""


@dataclass(slots=True)  # not frozen: one is made for every token, at half the cost
class TokenPiece:
    """Consecutive tokens of one message."""

    start: int  # absolute position of the first
    token_ids: list[int]
    logprobs: Sequence[TokenLogprobs] = ()


class TokenMerger:
    """The output of one choice so far. Invariant: `output` only grows, without gap or repeat.

    When logprobs are wanted, each token of the output has its own.
    """

    def __init__(
        self,
        num_prompt_tokens: int,
        *,
        choice_index: int = 0,
        has_logprobs: bool = False,
        has_prompt_logprobs: bool = False,
        prompt_logprobs: list[TokenLogprobs] | None = None,  # one list for all choices of a prompt
    ) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.choice_index = choice_index
        self.output: list[int] = []
        self.finish_reason: FinishReason | None = None  # known; tokens before it may be missing
        self.is_cancelled = False  # the consumer has all it wants of it
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs = [] if prompt_logprobs is None else prompt_logprobs
        self._has_logprobs = has_logprobs
        # The first token of a prompt has none.
        self._num_prompt_logprobs = num_prompt_tokens - 1 if has_prompt_logprobs else 0
        self._early: list[TokenPiece] = []

    @property
    def position(self) -> int:
        """Absolute position of the next token."""
        return self.num_prompt_tokens + len(self.output)

    @property
    def has_early(self) -> bool:
        """Whether tokens wait behind a gap."""
        return bool(self._early)

    @property
    def is_finished(self) -> bool:
        """Whether its last token and its finish reason are here."""
        return self.finish_reason is not None and not self.has_early

    @property
    def is_over(self) -> bool:
        """Whether nothing more is wanted of the workers."""
        return self.is_cancelled or self.is_finished

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether logprobs of the prompt are still to come."""
        return len(self.prompt_logprobs) < self._num_prompt_logprobs

    def start_attempt(self) -> None:
        """What an ended attempt left behind a gap means nothing to the next."""
        if self._early:
            self._early.clear()
            self.finish_reason = None

    def add_prompt_logprobs(self, start: int, entries: Sequence[TokenLogprobs]) -> None:
        """Take a piece of the prompt's logprobs; TokenGapError when one before it is missing."""
        if not self._num_prompt_logprobs:
            return
        num_known = len(self.prompt_logprobs) + 1 - start
        if start < 1 or num_known < 0:
            raise TokenGapError(f"Got prompt logprobs from {start}, but not those before")
        self.prompt_logprobs += entries[num_known:]
        if len(self.prompt_logprobs) > self._num_prompt_logprobs:
            raise TokenGapError("Got more prompt logprobs than tokens")

    def add(self, piece: TokenPiece, *, may_wait: bool) -> list[int]:
        """Return the tokens that are new now, in order."""
        if not piece.token_ids:
            return []
        if piece.start > self.position or self.lacks_prompt_logprobs:
            if not may_wait:
                raise TokenGapError(f"Got tokens from {piece.start} but expected {self.position}")
            self._early.append(piece)
            return []
        added = self._append(piece)
        while self._early and self._early[0].start <= self.position:
            added += self._append(self._early.pop(0))
        return added

    def newest(self, num_tokens: int, finish_reason: FinishReason | None) -> TokenBatch:
        """Return the last tokens of the output as they go to the consumer."""
        start = len(self.output) - num_tokens
        is_first = num_tokens > 0 and start == 0
        return TokenBatch(
            self.output[start:],
            finish_reason,
            self.logprobs[start:] if self._has_logprobs else [],
            list(self.prompt_logprobs) if is_first else [],
            choice_index=self.choice_index,
        )

    def close_gap(self) -> None:
        """No other stream is left that could fill a gap."""
        if self._early:
            start = self._early[0].start
            raise TokenGapError(f"Tokens from {self.position} to {start} never came")

    def _append(self, piece: TokenPiece) -> list[int]:
        start, token_ids = piece.start, piece.token_ids
        begin = start - self.num_prompt_tokens
        if begin < 0:
            raise TokenGapError(f"Got a token at {start}, inside the prompt")
        num_known = min(len(self.output) - begin, len(token_ids))
        if token_ids[:num_known] != self.output[begin : begin + num_known]:
            raise TokenGapError(f"Tokens from {start} were repeated differently")
        added = token_ids[num_known:]
        if self._has_logprobs:
            if added and len(piece.logprobs) != len(token_ids):
                raise TokenGapError(f"Tokens from {start} came without their logprobs")
            self.logprobs += piece.logprobs[num_known:]
        self.output += added
        return added


def new_mergers(request: RoutedRequest) -> list[TokenMerger]:
    """One for each choice of a request; they share what is told of its prompt."""
    sampling = request.sampling
    prompt_logprobs: list[TokenLogprobs] = []
    return [
        TokenMerger(
            len(request.token_ids),
            choice_index=choice_index,
            has_logprobs=sampling.HasField("num_logprobs"),
            has_prompt_logprobs=sampling.HasField("num_prompt_logprobs"),
            prompt_logprobs=prompt_logprobs,
        )
        for choice_index in range(request.num_choices)
    ]
