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

    def filled_block_ids(self, block_size: int) -> list[int]:
        """Blocks of the request that this step writes from their first token to their last."""
        return self.request.block_ids[-(-self.start // block_size) : self.end // block_size]

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
    new_block_ids: list[int] = field(default_factory=list)  # given to a request for this step
    num_preemptions: int = 0

    def block_ids_to_wipe(self, block_size: int) -> list[int]:
        """New blocks, but those that the step fills: nobody reads what was in them before."""
        if not self.new_block_ids:
            return []
        filled = {each for entry in self.scheduled for each in entry.filled_block_ids(block_size)}
        return [each for each in self.new_block_ids if each not in filled]

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
