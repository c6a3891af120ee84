"""The one cost formula: seconds until the first decoded token may follow, plus harm to others.

    queue + max(prefill, slot_wait, transfer of all but the last chunk)
          + transfer of the last chunk + affinity + HARM_WEIGHT x (seconds added to other streams)

It weighs every linked pair and, without transfer, every decode worker alone: whether a prompt is
handed over follows from nothing else. All rates come from the workers' own reports.
"""

from dataclasses import dataclass
from typing import NamedTuple

from router.worker_view import LinkView, WorkerView

HARM_WEIGHT = 1.0  # a second added to another stream is worth a second of ours
# A worker other than the session's own costs this share of the prompt's computation more: enough
# to decide between equals, not to wait behind others.
AFFINITY_SHARE = 0.25
UNMEASURED_BYTES_PER_S = 100e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one request asks of its workers."""

    num_tokens: int  # prompt and replayed output
    num_output_tokens: int  # expected still to come


class Cost(NamedTuple):
    """The terms, in seconds."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    slot_wait_s: float = 0.0
    transfer_head_s: float = 0.0  # all but the last chunk; flows while prefill goes on
    transfer_tail_s: float = 0.0  # the last chunk
    affinity_s: float = 0.0  # for leaving the session's own worker
    harm_s: float = 0.0  # weighted

    @property
    def own_s(self) -> float:
        """What this request itself waits."""
        overlapped = max(self.prefill_s, self.slot_wait_s, self.transfer_head_s)
        return self.queue_s + overlapped + self.transfer_tail_s

    @property
    def total_s(self) -> float:
        """What the policy minimises."""
        return self.own_s + self.affinity_s + self.harm_s

    def terms(self) -> dict[str, float]:
        """Every term and the total, for spans and the status page."""
        return {**self._asdict(), "total_s": self.total_s}


class DecodePart(NamedTuple):
    """What a decode worker adds to any choice with it."""

    slot_wait_s: float
    harm_s: float  # weighted, of decoding alone


def prefill_s(num_uncached: int, worker: WorkerView) -> float:
    """Seconds of computing this many prompt tokens: a step's fixed cost and its share for each."""
    return worker.fixed_s + max(num_uncached, 1) * worker.token_s


def decode_part(need: Need, decode: WorkerView, *, num_cached: int) -> DecodePart:
    """Cost of one more stream on `decode`, wherever its prompt is computed."""
    slot_wait_s = 0.0
    num_new = need.num_tokens + 1 - num_cached
    is_short = num_new > decode.num_free_blocks * decode.block_size
    if is_short or decode.num_requests >= decode.max_num_seqs:
        slot_wait_s = _slot_wait_s(need, decode, num_new)
    num_streams = min(decode.num_requests, decode.max_num_seqs)
    if not num_streams:
        return DecodePart(slot_wait_s, 0.0)
    # One more row makes each step longer; unless known better, by what one prompt token takes.
    num_kv_tokens = need.num_tokens + need.num_output_tokens / 2
    added_s = decode.request_s + num_kv_tokens * decode.kv_token_s or decode.token_s
    return DecodePart(slot_wait_s, HARM_WEIGHT * num_streams * need.num_output_tokens * added_s)


def pair_cost(  # noqa: PLR0913 - the parts of the formula
    need: Need,
    prefill: WorkerView,
    decode: WorkerView,
    part: DecodePart,
    *,
    num_cached_prefill: int = 0,  # tokens the prefill worker holds
    num_cached_decode: int = 0,
    num_strangers: int = 0,  # of the two, those that are not the session's own
) -> Cost:
    """Cost of computing on `prefill` and handing over to `decode`, which are linked."""
    link = decode.links[prefill.key]
    num_uncached = max(need.num_tokens - num_cached_prefill, 1)
    compute_s = prefill_s(num_uncached, prefill)
    num_to_send = max(need.num_tokens - num_cached_decode, 0)
    num_last = min(num_to_send, num_uncached, max(prefill.max_num_batched_tokens, 1))
    token_s = decode.kv_bytes_per_token / (link.bandwidth_bytes_per_s or UNMEASURED_BYTES_PER_S)
    return Cost(
        prefill.queue_s,
        compute_s,
        part.slot_wait_s,
        link_queue_s(link, decode) + (num_to_send - num_last) * token_s,
        link.latency_s + num_last * token_s,
        num_strangers / 2 * AFFINITY_SHARE * compute_s,
        part.harm_s,
    )


def local_cost(
    need: Need,
    decode: WorkerView,
    part: DecodePart,
    *,
    num_cached_decode: int = 0,
    num_strangers: int = 0,
) -> Cost:
    """Cost of a decode worker that computes the prompt itself, between its streams' steps."""
    compute_s = prefill_s(need.num_tokens - num_cached_decode, decode)
    return Cost(
        decode.queue_s,
        compute_s,
        part.slot_wait_s,
        0.0,
        0.0,
        num_strangers * AFFINITY_SHARE * compute_s,
        part.harm_s + HARM_WEIGHT * decode.num_running * compute_s,
    )


def local_bound_s(
    need: Need, decode: WorkerView, part: DecodePart, *, num_cached_decode: int
) -> float:
    """Seconds that `local_cost` does not go below."""
    compute_s = prefill_s(need.num_tokens - num_cached_decode, decode)
    harm_s = part.harm_s + HARM_WEIGHT * decode.num_running * compute_s
    return decode.queue_s + max(compute_s, part.slot_wait_s) + harm_s


def link_queue_s(link: LinkView, decode: WorkerView) -> float:
    """Until what waits for the link, and what was just sent its way, has passed."""
    num_bytes = link.queued_bytes + decode.pending.num_bytes
    return num_bytes / (link.bandwidth_bytes_per_s or UNMEASURED_BYTES_PER_S)


def _slot_wait_s(need: Need, decode: WorkerView, num_new: int) -> float:
    """Until a running request makes room, for a sequence and for its blocks."""
    stream_s = decode.fixed_s * max(need.num_output_tokens, 1)
    num_over = decode.num_requests + 1 - decode.max_num_seqs
    seq_wait_s = max(num_over, 0) * stream_s / max(decode.max_num_seqs, 1)
    num_missing = -(-max(num_new, 0) // decode.block_size) - decode.num_free_blocks
    block_wait_s = max(num_missing, 0) * stream_s / max(decode.num_used_blocks, 1)
    return max(seq_wait_s, block_wait_s)
