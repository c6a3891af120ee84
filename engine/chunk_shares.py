"""How the prompt tokens of one step are shared out."""

from engine.request import Request
from engine.schedule import ScheduledRequest

# Rows of logits of prompts in one step: each is as long as the vocabulary.
_MAX_PROMPT_LOGITS = 256


class ChunkShares:
    """Gives prompts pieces of a step, in the order in which they ask.

    The first that cannot be finished gets what the others leave, at least half of the rest: the
    other half is for prompts of its own priority that can be finished with it. So a short prompt
    does not wait for the end of a long one, and takes at most half of its speed.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_left = num_tokens
        self._num_prompt_logits_left = _MAX_PROMPT_LOGITS
        self._num_kept = 0  # for the long one
        self._long: Request | None = None
        self._chunks: list[ScheduledRequest] = []

    @property
    def is_spent(self) -> bool:
        """Whether nobody else can get anything."""
        return self._num_left <= 0

    def admits(self, request: Request, num_tokens: int) -> bool:
        """Whether a request with this much of its prompt to compute would get a piece."""
        if self._long is None:
            return not self.is_spent
        return request.priority == self._long.priority and num_tokens <= self._num_left

    def give(self, request: Request) -> None:
        """Give an admitted request its piece, or the long one the promise of it."""
        num_tokens = request.num_tokens - request.num_computed_tokens
        if request.wants_prompt_logprobs:
            num_tokens = min(num_tokens, self._num_prompt_logits_left)
            self._num_prompt_logits_left -= num_tokens
        if num_tokens <= self._num_left:
            self._add(request, num_tokens)
            self._num_left -= num_tokens
        else:
            assert self._long is None, "a second long prompt was not admitted"
            self._long = request
            self._num_kept = self._num_left - self._num_left // 2
            self._num_left //= 2

    def close(self) -> list[ScheduledRequest]:
        """All pieces; what is left goes to the long one."""
        if self._long is not None:
            self._add(self._long, self._num_kept + self._num_left)
        return self._chunks

    def _add(self, request: Request, num_tokens: int) -> None:
        if num_tokens:
            start = request.num_computed_tokens
            end = start + num_tokens
            self._chunks.append(ScheduledRequest(request=request, start=start, end=end))
