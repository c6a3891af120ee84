"""The one cost formula: seconds until the first decoded token may follow, plus harm to others.

    queue + max(prefill, slot_wait, transfer of all but the last chunk)
          + transfer of the last chunk + affinity + HARM_WEIGHT x (seconds added to other streams)

It weighs every linked pair and, without transfer, every decode worker alone: whether a prompt is
handed over follows from nothing else. All rates come from the workers' own reports.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router.worker_view import LinkView, WorkerKey, WorkerView

HARM_WEIGHT = 1.0  # a second added to another stream is worth a second of ours
# A worker other than the session's own costs this share of the prompt's computation more: enough
# to decide between equals, not to wait behind others.
AFFINITY_SHARE = 0.25
UNMEASURED_BYTES_PER_S = 100e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one request asks of its workers."""

    num_tokens: int  # prompt and replayed output
    num_output_tokens: int  # expected still to come, of each choice
    num_choices: int = 1


class Cost(NamedTuple):
    """The terms, in seconds."""

    queue_s: float
    prefill_s: float
    slot_wait_s: float
    transfer_head_s: float  # all but the last chunk; flows while prefill goes on
    transfer_tail_s: float  # the last chunk
    affinity_s: float  # for leaving the session's own workers
    harm_s: float  # weighted
    total_s: float  # what the policy minimises

    @property
    def own_s(self) -> float:
        """What this request itself waits."""
        return self.total_s - self.affinity_s - self.harm_s

    def terms(self) -> dict[str, float]:
        """Every term and the total, for spans and the status page."""
        return self._asdict()


class DecodePart(NamedTuple):
    """What a decode worker adds to any choice with it."""

    slot_wait_s: float
    harm_s: float  # weighted, of decoding alone


def prefill_s(num_uncached: int, worker: WorkerView) -> float:
    """Seconds of computing this many prompt tokens: a step's fixed cost and its share for each."""
    return worker.fixed_s + max(num_uncached, 1) * worker.token_s


def decode_part(need: Need, decode: WorkerView, *, num_cached: int) -> DecodePart:
    """Cost of the streams of one more request on `decode`, wherever its prompt is computed."""
    slot_wait_s = 0.0
    # All choices share the prompt's blocks but one each.
    num_new = need.num_tokens + 1 - num_cached + (need.num_choices - 1) * decode.block_size
    is_short = num_new > decode.num_free_blocks * decode.block_size
    if is_short or decode.num_requests + need.num_choices > decode.max_num_seqs:
        slot_wait_s = _slot_wait_s(need, decode, num_new)
    num_kv_tokens = need.num_tokens + need.num_output_tokens / 2
    step_s = decode.streams_s + decode.num_streams * num_kv_tokens * decode.kv_token_s
    num_steps = need.num_output_tokens * need.num_choices
    return DecodePart(slot_wait_s, HARM_WEIGHT * num_steps * step_s)


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
    head_s = link_queue_s(link, decode) + (num_to_send - num_last) * token_s
    tail_s = link.latency_s + num_last * token_s
    affinity_s = num_strangers / 2 * AFFINITY_SHARE * compute_s
    slot_s, harm_s = part
    own_s = prefill.queue_s + max(compute_s, slot_s, head_s) + tail_s
    total_s = own_s + affinity_s + harm_s
    return Cost(prefill.queue_s, compute_s, slot_s, head_s, tail_s, affinity_s, harm_s, total_s)


def local_cost(
    need: Need,
    decode: WorkerView,
    part: DecodePart,
    *,
    num_cached_decode: int = 0,
    num_strangers: int = 0,
) -> Cost:
    """Cost of a decode worker that computes the prompt itself, between its streams' steps."""
    num_uncached = max(need.num_tokens - num_cached_decode, 1)
    compute_s = prefill_s(num_uncached, decode)
    affinity_s = num_strangers * AFFINITY_SHARE * compute_s
    slot_s = part.slot_wait_s
    # The running streams' steps come anyway; the prompt's tokens only make them longer.
    harm_s = part.harm_s + HARM_WEIGHT * decode.num_running * num_uncached * decode.added_s
    total_s = decode.queue_s + max(compute_s, slot_s) + affinity_s + harm_s
    return Cost(decode.queue_s, compute_s, slot_s, 0.0, 0.0, affinity_s, harm_s, total_s)


def pair_bounds(
    need: Need, workers: Sequence[WorkerView], cached: Mapping[WorkerKey, int]
) -> list[float]:
    """Seconds below which no pair with each of these prefill workers can cost."""
    num_tokens, get = need.num_tokens, cached.get
    return [
        worker.queue_s + worker.fixed_s + (num_tokens - get(worker.key, 0)) * worker.token_s
        for worker in workers
    ]


def local_bounds(
    need: Need, workers: Sequence[WorkerView], cached: Mapping[WorkerKey, int]
) -> list[float]:
    """Seconds below which each of these decode workers alone can not cost."""
    num_tokens, num_output, get = need.num_tokens, need.num_output_tokens, cached.get
    return [
        worker.queue_s
        + worker.fixed_s
        + (num_tokens - get(worker.key, 0))
        * (worker.token_s + HARM_WEIGHT * worker.num_running * worker.added_s)
        + HARM_WEIGHT * num_output * worker.streams_s
        for worker in workers
    ]


def link_queue_s(link: LinkView, decode: WorkerView) -> float:
    """Until what waits for the link, and what was just sent its way, has passed."""
    num_bytes = link.queued_bytes + decode.pending.num_bytes
    return num_bytes / (link.bandwidth_bytes_per_s or UNMEASURED_BYTES_PER_S)


def _slot_wait_s(need: Need, decode: WorkerView, num_new: int) -> float:
    """Until a running request makes room, for a sequence and for its blocks."""
    stream_s = decode.fixed_s * max(need.num_output_tokens, 1)
    num_over = decode.num_requests + need.num_choices - decode.max_num_seqs
    seq_wait_s = max(num_over, 0) * stream_s / max(decode.max_num_seqs, 1)
    num_missing = -(-max(num_new, 0) // decode.block_size) - decode.num_free_blocks
    block_wait_s = max(num_missing, 0) * stream_s / max(decode.num_used_blocks, 1)
    return max(seq_wait_s, block_wait_s)
