"""One request on its way through the simulated cluster, and what became of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from router.block_name import BlockName, BlockScheme
from router.worker_view import WorkerKey
from sim.trace import TraceRequest


@dataclass(slots=True, eq=False, kw_only=True)
class Flight:
    """As the router's client sees it. Invariant: `finished_s` is set once, or `error` is."""

    request: TraceRequest
    names: Sequence[BlockName]  # of the prompt's full blocks
    num_generated: int = 0  # known to the router after a lost worker
    num_attempts: int = 0
    num_refusals: int = 0
    num_cached: int = 0  # prompt tokens nobody had to compute, at the first routing
    num_predicted: int = 0  # so many were expected to be
    prefill_id: str = ""  # empty: the decode worker computed the prompt itself
    decode_id: str = ""
    waited_s: float = 0.0  # in the router's line
    first_token_s: float | None = None  # since arrival
    finished_s: float | None = None  # since arrival
    error: str = ""
    excluded: set[WorkerKey] = field(default_factory=set)

    @property
    def time_per_output_token_s(self) -> float:
        """Mean time between its tokens; 0 with one token."""
        if self.first_token_s is None or self.finished_s is None:
            return float("inf")
        num_gaps = self.request.num_output_tokens - 1
        return (self.finished_s - self.first_token_s) / num_gaps if num_gaps else 0.0


@dataclass(slots=True, kw_only=True)
class SimPrompt:
    """A flight as the router's chooser asks for it (`router.chooser.Routable`)."""

    flight: Flight
    num_output_tokens: int  # expected
    num_choices: int = 1
    session_key: str = ""
    skips_cache: bool = False

    def __len__(self) -> int:
        return self.flight.request.num_prompt_tokens + self.flight.num_generated

    def block_names(self, scheme: BlockScheme) -> Sequence[BlockName]:
        """Names of its full blocks; all simulated workers cut them alike."""
        del scheme
        return self.flight.names
