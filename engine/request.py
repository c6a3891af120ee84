"""One request as the engine sees it, and what the engine says about it after a step."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from engine.block_hash import BlockHash
from engine.sampling.params import SamplingParams
from engine.token_logprobs import PromptLogprobs, TokenLogprobs
from engine.token_mask import TokenMask


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    MIGRATE = "migrate"


class RequestStatus(StrEnum):
    """Where a request is."""

    WAITING = "waiting"  # in the queue, owns nothing
    WAITING_FOR_KV = "waiting_for_kv"  # blocks reserved, KV on its way from a peer
    RUNNING = "running"
    PREEMPTED = "preempted"  # back in the queue, blocks given up
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True)
class RequestTimings:
    """Durations of one request on this engine, in seconds; 0 until known."""

    prefill_wait_s: float = 0.0  # admission to the first scheduled chunk
    prefill_s: float = 0.0  # first scheduled chunk to the first token
    slot_wait_s: float = 0.0  # all KV present to the first scheduled decode step
    first_decode_s: float = 0.0  # that step's start to its token


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Request:
    """One request. Invariant: KV of `token_ids[:num_computed_tokens]` lies in `block_ids`."""

    request_id: str
    token_ids: list[int]  # prompt and output so far; the engine appends
    num_prompt_tokens: int  # the client's own prompt, also after a migration
    sampling_params: SamplingParams
    cache_salt: str = ""
    request_label: str = ""
    priority: int = 0  # lower runs earlier, and may preempt what is higher
    hand_over: bool = False  # compute, sample the first tokens, keep the KV for a peer
    choice_index: int = 0  # of the first of its choices; part of the random stream's place
    num_choices: int = 1  # how many continuations its prompt gets
    new_token_mask: Callable[[], TokenMask] | None = None  # starts its grammar, if it has one

    # The engine's own, from here on.
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    block_ids: list[int] = field(default_factory=list, init=False)
    spare_block_ids: list[int] = field(default_factory=list, init=False)  # for choices to come
    ended_choices: set[int] = field(default_factory=set, init=False)  # ended before they began
    block_hashes: list[BlockHash] = field(default_factory=list, init=False)  # of full blocks
    num_computed_tokens: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)  # hits at the first admission
    num_stored_blocks: int = field(default=0, init=False)  # leading blocks offered to the map
    num_preemptions: int = field(default=0, init=False)
    # First position of the prompt whose logprobs are still to be told, if they are wanted.
    prompt_logprobs_start: int = field(default=1, init=False)
    arrival: int = field(default=0, init=False)  # order of admission
    arrived_at_s: float = field(default=0.0, init=False)  # add_request, or activate
    first_scheduled_at_s: float | None = field(default=None, init=False)
    has_kv_from_peer: bool = field(default=False, init=False)
    has_first_output: bool = field(default=False, init=False)
    timings: RequestTimings = field(default_factory=RequestTimings, init=False)

    @property
    def rank(self) -> tuple[int, int, int]:
        """Its place in every queue: the smallest first."""
        return (self.priority, self.arrival, self.choice_index)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated since the client's prompt, on any worker."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def owned_block_ids(self) -> list[int]:
        """Every block it has a reference to, or a hold."""
        return self.block_ids + self.spare_block_ids

    @property
    def choices(self) -> range:
        """Indexes of its choices."""
        return range(self.choice_index, self.choice_index + self.num_choices)

    @property
    def open_choices(self) -> set[int]:
        """Those of its choices that were not ended."""
        return set(self.choices) - self.ended_choices

    @property
    def num_seqs(self) -> int:
        """Places it takes among the running: its choices go on here together."""
        return 1 if self.hand_over else self.num_choices

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logits of its prompt are still needed: a cached block has none."""
        return (
            self.sampling_params.num_prompt_logprobs is not None
            and self.prompt_logprobs_start < self.num_prompt_tokens
        )

    def branch(self, choice_index: int, token_id: int) -> "Request":
        """One of its choices, going on from the computed prompt; the fork gives it blocks."""
        branch = copy.copy(self)
        branch.choice_index, branch.num_choices = choice_index, 1
        branch.token_ids = [*self.token_ids, token_id]
        branch.block_ids, branch.spare_block_ids, branch.ended_choices = [], [], set()
        branch.block_hashes = list(self.block_hashes)
        branch.timings = replace(self.timings)
        return branch


def take_tokens(request: Request, tokens: Mapping[int, int]) -> list[Request]:
    """The open choices with their new tokens: a single one is the request itself."""
    if request.num_choices == 1:
        request.token_ids.append(tokens[request.choice_index])
        return [request]
    return [
        request.branch(choice_index, token_id)
        for choice_index, token_id in tokens.items()
        if choice_index in request.open_choices
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Blocks promised to a request whose KV comes from a peer."""

    block_ids: list[int]
    num_cached_tokens: int  # leading tokens whose KV is here already


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What one step changed for one choice of a request."""

    request_id: str
    choice_index: int = 0
    start_position: int  # absolute position of token_ids[0], or of the next token when empty
    token_ids: tuple[int, ...]  # new tokens
    num_computed_tokens: int
    num_cached_tokens: int
    num_preemptions: int = 0  # of this choice so far
    finish_reason: FinishReason | None = None
    error: str | None = None  # set with FinishReason.ERROR
    is_refused: bool = False  # with an error: no worker could do what it asks for
    timings: RequestTimings | None = None  # set with the first token and at the end
    logprobs: tuple[TokenLogprobs, ...] = ()  # of token_ids, when they are wanted
    prompt_logprobs: PromptLogprobs | None = None  # what this step found out of the prompt
