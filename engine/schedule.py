"""What one step will run: the scheduler's word to the rest of the engine."""

from dataclasses import dataclass, field

from engine.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRequest:
    """One request's share of a step: tokens `[start, end)`."""

    request: Request
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Tokens of this share."""
        return self.end - self.start

    @property
    def samples(self) -> bool:
        """Whether the step produces this request's next token."""
        return self.end == self.request.num_tokens

    @property
    def prompt_logprob_positions(self) -> range:
        """Tokens of the prompt whose logprobs are wanted and come out of the ones before them."""
        request = self.request
        if not request.wants_prompt_logprobs:
            return range(0)
        start = max(self.start + 1, request.prompt_logprobs_start)
        return range(start, min(self.end + 1, request.num_prompt_tokens))


@dataclass(slots=True, kw_only=True)
class Schedule:
    """What one step will run."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)  # single tokens first
    new_block_ids: list[int] = field(default_factory=list)  # to be wiped before the step
    num_preemptions: int = 0

    @property
    def num_decodes(self) -> int:
        """Requests that run one token."""
        return sum(entry.num_tokens == 1 for entry in self.scheduled)

    @property
    def num_decode_kv_tokens(self) -> int:
        """Tokens of KV that those requests read."""
        return sum(entry.end for entry in self.scheduled if entry.num_tokens == 1)

    @property
    def num_tokens(self) -> int:
        """Tokens in the step."""
        return sum(entry.num_tokens for entry in self.scheduled)
