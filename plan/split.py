"""How many of some workers should prefill: what each pool can do of one kind of request.

The simulator searches the split for a trace; for requests of one
length a closed form is enough:

    prefill worker   1 / time of a prompt, or what its link carries
    decode worker    requests at once / (output tokens x step time)
    aggregated       the same worker pays for both, and its streams wait while it prefills
"""

from collections.abc import Callable
from dataclasses import dataclass

from plan.memory import MemoryPlan
from plan.speed import Speed

_SECONDS_PER_HOUR = 3600.0
_MILLION = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One kind of request, and how fast its tokens must come."""

    num_input_tokens: int
    num_output_tokens: int
    tpot_s: float  # slowest good mean time between tokens

    def __post_init__(self) -> None:
        """Refuse what is no request."""
        if self.num_input_tokens < 1 or self.num_output_tokens < 1:
            raise ValueError("Got a request without tokens but expected at least one in and out")

    @property
    def num_tokens(self) -> int:
        """Of one request at its end."""
        return self.num_input_tokens + self.num_output_tokens

    @property
    def mean_context_len(self) -> int:
        """While it decodes."""
        return self.num_input_tokens + self.num_output_tokens // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What one worker does, in requests per second."""

    rate: float
    num_seqs: int  # at once
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Workers of each pool, and what comes of them."""

    num_prefill: int
    num_decode: int
    prefill: Pool
    decode: Pool
    aggregated: Pool  # one worker that does both
    ttft_s: float  # of a request that waits for nobody

    @property
    def rate(self) -> float:
        """Requests per second of all workers together."""
        if self.num_prefill == 0:
            return self.num_decode * self.aggregated.rate
        return min(self.num_prefill * self.prefill.rate, self.num_decode * self.decode.rate)

    @property
    def aggregated_rate(self) -> float:
        """Of as many workers that do both."""
        return (self.num_prefill + self.num_decode) * self.aggregated.rate

    @property
    def prefill_per_decode(self) -> float:
        """Prefill workers that keep one decode worker busy."""
        return self.decode.rate / self.prefill.rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Of a million tokens, in the currency of the price of a worker's hour."""

    input: float
    output: float
    blended: float  # of all tokens, at the split's own balance


def plan_split(
    work: Work, prefill: Speed, decode: Speed, memory: MemoryPlan, *, num_workers: int
) -> Split:
    """The best split of so many workers; ValueError where the work cannot be done at all."""
    _refuse(work, memory)
    pools = {
        "prefill": _prefill_pool(work, prefill),
        "decode": _decode_pool(work, decode, memory),
        "aggregated": _aggregated_pool(work, decode, memory),
    }
    ttft_s = prefill.prefill_s(work.num_input_tokens) + 2 * prefill.hardware.rpc_latency_s
    splits = [
        Split(num_prefill=number, num_decode=num_workers - number, ttft_s=ttft_s, **pools)
        for number in range(min(1, num_workers - 1), num_workers)
    ]
    return max(splits, key=lambda split: split.rate)


def plan_costs(work: Work, split: Split, *, price_per_hour: float) -> Costs:
    """What busy workers cost; the blend counts the idle ones of the split too."""
    price_per_s = price_per_hour / _SECONDS_PER_HOUR
    num_workers = split.num_prefill + split.num_decode
    return Costs(
        input=price_per_s / (split.prefill.rate * work.num_input_tokens) * _MILLION,
        output=price_per_s / (split.decode.rate * work.num_output_tokens) * _MILLION,
        blended=num_workers * price_per_s / (split.rate * work.num_tokens) * _MILLION,
    )


def _refuse(work: Work, memory: MemoryPlan) -> None:
    if work.num_tokens > memory.max_model_len:
        raise ValueError(
            f"Got requests of {work.num_tokens} tokens but expected at most "
            f"{memory.max_model_len}, input and output together"
        )


def _prefill_pool(work: Work, speed: Speed) -> Pool:
    prompt_s = speed.prefill_s(work.num_input_tokens)
    hardware = speed.hardware
    num_bytes = work.num_input_tokens * hardware.kv_bytes_per_token
    rate = min(1.0 / prompt_s, hardware.link_bytes_per_s / num_bytes)
    return Pool(rate=rate, num_seqs=1, tpot_s=0.0)


def _decode_pool(work: Work, speed: Speed, memory: MemoryPlan) -> Pool:
    def tpot_s(num_seqs: int) -> float:
        return speed.decode_step_s(num_seqs, work.mean_context_len)

    return _largest(work, memory, tpot_s)


def _aggregated_pool(work: Work, speed: Speed, memory: MemoryPlan) -> Pool:
    prompt_s = speed.prefill_s(work.num_input_tokens)

    def tpot_s(num_seqs: int) -> float:
        """Each of them computes a prompt while the others wait."""
        step_s = speed.decode_step_s(num_seqs, work.mean_context_len)
        return step_s + num_seqs * prompt_s / work.num_output_tokens

    return _largest(work, memory, tpot_s)


def _largest(work: Work, memory: MemoryPlan, tpot_s: Callable[[int], float]) -> Pool:
    """As many at once as fit and are fast enough; one where none is."""
    most = memory.max_concurrency(work.num_tokens)
    low, high = 1, most  # `tpot_s` only grows
    while low < high:
        middle = (low + high + 1) // 2
        if tpot_s(middle) <= work.tpot_s:
            low = middle
        else:
            high = middle - 1
    step_s = tpot_s(low)
    return Pool(rate=low / (work.num_output_tokens * step_s), num_seqs=low, tpot_s=step_s)
