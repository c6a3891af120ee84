"""What the ingress hands to the router, and what it gets back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from opentelemetry.context import Context
from relevo.v1 import common_pb2, state_pb2

from router.logprobs import TokenLogprobs


class FinishReason(StrEnum):
    """Why a generation ended, as a client may see it."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who shares the cluster with others."""

    name: str = ""
    weight: float = 1.0  # its share of the tokens while others wait too, as a ratio to theirs


EVERYBODY = Tenant()


def class_of(priority: int) -> int:
    """The class in which a request of this priority waits: 0 goes first, 2 last."""
    return 1 + (priority > 0) - (priority < 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRequest:
    """One prompt to be served. The router never changes it."""

    request_id: str  # unique inside the cluster
    token_ids: Sequence[int]
    sampling: common_pb2.SamplingParams  # every number resolved, the seed too
    cache_salt: str = ""
    num_choices: int = 1  # continuations of the prompt, by index from 0
    request_label: str = ""  # the client's X-Request-Id; never a key
    tenant: Tenant = EVERYBODY  # whose turn it takes while requests wait
    priority: int = 0  # lower goes first: below 0, 0, above 0 are the classes of the queue
    session_key: str = ""  # requests with the same one probably share a prefix
    timeout_s: float | None = None  # None: the router's request_timeout_s
    arrived_at: float | None = None  # on the router's clock; None: when generate() is called
    trace_context: Context | None = None  # parent of the route span


@dataclass(slots=True)  # not frozen: one is made for every token, at half the cost
class TokenBatch:
    """New tokens of one choice; its last batch, which may be empty, carries the finish reason."""

    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of token_ids, when wanted
    # Of the prompt but for its first token, when wanted; with the first tokens.
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    choice_index: int = 0

    def joined(self, later: "TokenBatch") -> "TokenBatch":
        """Return both as one."""
        return TokenBatch(
            self.token_ids + later.token_ids,
            later.finish_reason,
            self.logprobs + later.logprobs,
            self.prompt_logprobs + later.prompt_logprobs,
            self.choice_index,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The served model as the workers announce it."""

    model_id: str
    model_revision: str
    dtype: str
    max_model_len: int  # the smallest of all workers
    block_size: int  # of the decode pool
    max_num_seqs: int  # the smallest of the decode pool: how many choices can run together
    eos_token_ids: tuple[int, ...] = ()  # each of them ends a text


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The last load message of one live worker; `load` is the router's own, read only."""

    worker: common_pb2.WorkerRef
    pool: str
    load: state_pb2.WorkerLoad
