"""The one cost formula: seconds until the first decoded token may follow, what the company there
adds to our own steps, and harm to others.

    queue + max(prefill, slot_wait, transfer of all but the last chunk) + transfer of the last chunk
          + decode + affinity + HARM_WEIGHT x (seconds added to other streams)

It weighs every linked pair and, without transfer, every decode worker alone: whether a prompt is
handed over follows from nothing else. All rates come from the workers' own reports.

Here it is for one choice, term by term. `router/totals.py` has its total for all choices at once.
"""

from math import ceil
from typing import NamedTuple

from router.worker_view import LinkView, WorkerView

HARM_WEIGHT = 1.0  # a second added to another stream is worth a second of ours
# A worker other than the session's own costs this share of the prompt's computation more: enough
# to decide between equals, not to wait behind others.
AFFINITY_SHARE = 0.25


class Need(NamedTuple):
    """What one request asks of its workers."""

    num_tokens: int  # prompt and replayed output
    num_output_tokens: int  # expected still to come, of each choice
    num_choices: int = 1
    # Prompts that wait on a prefill worker, on average: what is computed keeps such waiting.
    num_kept_waiting: float = 0.0

    @property
    def num_kv_tokens(self) -> float:
        """Of one choice, on average while it is decoded."""
        return self.num_tokens + self.num_output_tokens / 2

    @property
    def num_steps(self) -> int:
        """Rows it adds to steps."""
        return self.num_output_tokens * self.num_choices


class Cost(NamedTuple):
    """The terms, in seconds."""

    queue_s: float
    prefill_s: float
    slot_wait_s: float
    transfer_head_s: float  # all but the last chunk; flows while prefill goes on
    transfer_tail_s: float  # the last chunk
    decode_s: float  # what the streams and the KV there add to our own steps
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
    decode_s: float
    harm_s: float  # weighted, of decoding alone


def prefill_s(num_uncached: float, worker: WorkerView) -> float:
    """Seconds of computing this many prompt tokens: a step's fixed cost and its share for each."""
    return worker.fixed_s + num_uncached * worker.token_s


def decode_part(need: Need, decode: WorkerView, *, num_cached: float) -> DecodePart:
    """Cost of the streams of one more request on `decode`, wherever its prompt is computed."""
    step_s = decode.streams_s + decode.kv_harm_s * need.num_kv_tokens
    return DecodePart(
        slot_wait_s=_slot_wait_s(need, decode, num_cached),
        decode_s=need.num_output_tokens * decode.company_s,
        harm_s=HARM_WEIGHT * need.num_steps * step_s,
    )


def pair_cost(  # noqa: PLR0913 - the parts of the formula
    need: Need,
    prefill: WorkerView,
    decode: WorkerView,
    link: LinkView,
    part: DecodePart,
    *,
    num_cached_prefill: float = 0,  # tokens the prefill worker holds
    num_cached_decode: float = 0,
    num_strangers: float = 0,  # of the two, those that are not the session's own
) -> Cost:
    """Cost of computing on `prefill` and handing over to `decode` by `link`."""
    num_uncached = max(need.num_tokens - num_cached_prefill, 1)
    compute_s = prefill_s(num_uncached, prefill)
    num_to_send = max(need.num_tokens - num_cached_decode, 0)
    num_last = min(num_to_send, num_uncached, prefill.chunk_tokens)
    token_s = decode.kv_bytes_per_token * link.byte_s
    # What waits for the link, and what was just sent its way, passes first.
    queued_s = (link.queued_bytes + decode.pending_bytes) * link.byte_s
    head_s = queued_s + (num_to_send - num_last) * token_s
    tail_s = link.latency_s + num_last * token_s
    affinity_s = num_strangers * AFFINITY_SHARE / 2 * compute_s
    slot_s, decode_s, harm_s = part
    harm_s += HARM_WEIGHT * need.num_kept_waiting * compute_s
    longest_s = max(compute_s, slot_s, head_s)
    total_s = prefill.queue_s + longest_s + tail_s + decode_s + affinity_s + harm_s
    return Cost(
        prefill.queue_s, compute_s, slot_s, head_s, tail_s, decode_s, affinity_s, harm_s, total_s
    )


def local_cost(
    need: Need,
    decode: WorkerView,
    part: DecodePart,
    *,
    num_cached_decode: float = 0,
    num_strangers: float = 0,
) -> Cost:
    """Cost of a decode worker that computes the prompt itself, between its streams' steps."""
    num_uncached = max(need.num_tokens - num_cached_decode, 1)
    compute_s = prefill_s(num_uncached, decode)
    affinity_s = num_strangers * AFFINITY_SHARE * compute_s
    slot_s, decode_s, harm_s = part
    # The streams' steps come anyway; the prompt's tokens only make them longer. Who waits for room
    # there waits longer, too.
    harm_s += HARM_WEIGHT * num_uncached * decode.prompt_harm_s
    total_s = decode.queue_s + max(compute_s, slot_s) + decode_s + affinity_s + harm_s
    return Cost(decode.queue_s, compute_s, slot_s, 0.0, 0.0, decode_s, affinity_s, harm_s, total_s)


def _slot_wait_s(need: Need, decode: WorkerView, num_cached: float) -> float:
    """Until a running request makes room, for a sequence and for its blocks; 0 if there is."""
    # All choices share the prompt's blocks but one each.
    num_new = need.num_tokens + 1 - num_cached + (need.num_choices - 1) * decode.block_size
    # Who was promised room before takes it first.
    num_wanted = ceil((num_new + decode.promised_tokens) / decode.block_size)
    block_s = (num_wanted - decode.num_free_blocks) * decode.block_step_s
    num_over = decode.num_requests + need.num_choices - decode.max_num_seqs
    seq_s = num_over * decode.seq_step_s
    return max(block_s, seq_s, 0.0) * max(need.num_output_tokens, 1)
