"""What became of one request: where its time went, what was cached, who served it.

    arrival      routed         first chunk     first token     second token      last token
    |- queue, route -|- prefill_wait -|- prefill -|- tail, slot, first decode -|     |
    |---------------- first_token_s --------------|----------- completion_s ---------|

`wire_s` and `second_wire_s` are what no other part explains. With a remote pair the hand-over lies
behind the first token.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReport:
    """Where time and tokens went.

    Invariants: first_token_s is the sum of its five parts, second_token_s - first_token_s of its
    four, num_prompt_tokens of its three; no part is negative.
    """

    request_id: str
    num_prompt_tokens: int
    num_completion_tokens: int = 0
    cached_prefill: int = 0  # prompt tokens the prefill worker had cached
    cached_decode: int = 0  # prompt tokens a decode worker that prefilled alone had cached
    computed: int = 0  # prompt tokens somebody computed
    queue_s: float = 0.0  # in the router's queue before the first token
    route_s: float = 0.0  # from arrival to the successful attempt, without the queue
    prefill_wait_s: float = 0.0
    prefill_s: float = 0.0
    wire_s: float = 0.0
    first_token_s: float | None = None  # TTFT; None: no token came
    second_token_s: float | None = None  # since arrival
    transfer_tail_s: float = 0.0
    slot_wait_s: float = 0.0
    first_decode_s: float = 0.0
    second_wire_s: float = 0.0
    kv_transfer_s: float = 0.0  # summed over transfers; overlaps the other parts, in no sum
    completion_s: float = 0.0  # first token to last
    elapsed_s: float = 0.0  # arrival to the end, or to now
    prefill_worker_id: str = (
        ""  # of the first routing that gave a token; empty: the decode worker alone
    )
    decode_worker_id: str = ""
    last_decode_worker_id: str = ""  # differs after a migration
    kv_transfer_bytes: int = 0
    num_attempts: int = 0
    num_migrations: int = 0  # attempts that took over after another was admitted
    finish_reason: str = ""  # stop, length, abort or error; empty while running

    @property
    def first_token_parts(self) -> Mapping[str, float]:
        """The five parts of first_token_s, in order, in seconds."""
        return {
            "queue": self.queue_s,
            "route": self.route_s,
            "prefill_wait": self.prefill_wait_s,
            "prefill": self.prefill_s,
            "wire": self.wire_s,
        }

    @property
    def second_token_parts(self) -> Mapping[str, float]:
        """The four parts of the time from the first token to the second, in order, in seconds."""
        return {
            "transfer_tail": self.transfer_tail_s,
            "slot_wait": self.slot_wait_s,
            "first_decode": self.first_decode_s,
            "wire": self.second_wire_s,
        }

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens nobody had to compute."""
        return self.cached_prefill + self.cached_decode

    @property
    def queue_time_s(self) -> float:
        """`usage.queue_time`."""
        return self.queue_s + self.route_s

    @property
    def prompt_time_s(self) -> float:
        """`usage.prompt_time`."""
        return self.prefill_wait_s + self.prefill_s + self.wire_s

    @property
    def total_time_s(self) -> float:
        """`usage.total_time`: without the queue."""
        return self.prompt_time_s + self.completion_s
