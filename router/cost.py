"""The one cost formula: seconds until the first decoded token may follow, what the company there
adds to our own steps, and harm to others.

    queue + max(prefill, slot_wait, transfer of all but the last chunk) + transfer of the last chunk
          + decode + affinity + HARM_WEIGHT x (seconds added to other streams)

It weighs every linked pair and, without transfer, every decode worker alone: whether a prompt is
handed over follows from nothing else. All rates come from the workers' own reports.

The same lines cost one choice or thousands: what they are given has one worker's numbers
(WorkerView) or columns of them (Columns), and so have the terms that come out.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy import ceil, maximum, minimum

from router.pools import Columns, LinkColumns
from router.worker_view import LinkView, WorkerView

HARM_WEIGHT = 1.0  # a second added to another stream is worth a second of ours
# A worker other than the session's own costs this share of the prompt's computation more: enough
# to decide between equals, not to wait behind others.
AFFINITY_SHARE = 0.25

# A number, or an array with one for each choice.
Numbers = Any
Workers = WorkerView | Columns
Links = LinkView | LinkColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one request asks of its workers."""

    num_tokens: int  # prompt and replayed output
    num_output_tokens: int  # expected still to come, of each choice
    num_choices: int = 1
    # Prompts that wait on a prefill worker, on average: what is computed keeps such waiting.
    num_kept_waiting: float = 0.0


class Cost(NamedTuple):
    """The terms, in seconds."""

    queue_s: Numbers
    prefill_s: Numbers
    slot_wait_s: Numbers
    transfer_head_s: Numbers  # all but the last chunk; flows while prefill goes on
    transfer_tail_s: Numbers  # the last chunk
    decode_s: Numbers  # what the streams and the KV there add to our own steps
    affinity_s: Numbers  # for leaving the session's own workers
    harm_s: Numbers  # weighted
    total_s: Numbers  # what the policy minimises

    @property
    def own_s(self) -> Numbers:
        """What this request itself waits."""
        return self.total_s - self.affinity_s - self.harm_s

    def at(self, place: tuple[int, ...]) -> "Cost":
        """One of many; a term may be equal along the last axis."""
        return Cost(*(_at(term, place) for term in self))

    def terms(self) -> dict[str, float]:
        """Every term and the total, for spans and the status page."""
        return self._asdict()


class DecodePart(NamedTuple):
    """What a decode worker adds to any choice with it."""

    slot_wait_s: Numbers
    decode_s: Numbers
    harm_s: Numbers  # weighted, of decoding alone


def prefill_s(num_uncached: Numbers, worker: Workers) -> Numbers:
    """Seconds of computing this many prompt tokens: a step's fixed cost and its share for each."""
    return worker.fixed_s + num_uncached * worker.token_s


def decode_part(need: Need, decode: Workers, *, num_cached: Numbers) -> DecodePart:
    """Cost of the streams of one more request on `decode`, wherever its prompt is computed."""
    num_kv_tokens = need.num_tokens + need.num_output_tokens / 2
    step_s = decode.streams_s + decode.num_streams * decode.kv_token_s * num_kv_tokens
    num_steps = need.num_output_tokens * need.num_choices
    own_step_s = decode.num_streams * decode.request_s + decode.kv_tokens * decode.kv_token_s
    return DecodePart(
        slot_wait_s=_slot_wait_s(need, decode, num_cached),
        decode_s=need.num_output_tokens * own_step_s,
        harm_s=HARM_WEIGHT * num_steps * step_s,
    )


def pair_cost(  # noqa: PLR0913 - the parts of the formula
    need: Need,
    prefill: Workers,
    decode: Workers,
    link: Links,
    part: DecodePart,
    *,
    num_cached_prefill: Numbers = 0,  # tokens the prefill worker holds
    num_cached_decode: Numbers = 0,
    num_strangers: Numbers = 0,  # of the two, those that are not the session's own
) -> Cost:
    """Cost of computing on `prefill` and handing over to `decode` by `link`."""
    num_uncached = maximum(need.num_tokens - num_cached_prefill, 1)
    compute_s = prefill_s(num_uncached, prefill)
    num_to_send = maximum(need.num_tokens - num_cached_decode, 0)
    num_last = minimum(minimum(num_to_send, num_uncached), prefill.chunk_tokens)
    token_s = decode.kv_bytes_per_token * link.byte_s
    # What waits for the link, and what was just sent its way, passes first.
    queued_s = (link.queued_bytes + decode.pending_bytes) * link.byte_s
    head_s = queued_s + (num_to_send - num_last) * token_s
    tail_s = link.latency_s + num_last * token_s
    affinity_s = num_strangers * AFFINITY_SHARE / 2 * compute_s
    slot_s, decode_s, harm_s = part
    harm_s = harm_s + HARM_WEIGHT * need.num_kept_waiting * compute_s
    longest_s = maximum(maximum(compute_s, slot_s), head_s)
    total_s = prefill.queue_s + longest_s + tail_s + decode_s + affinity_s + harm_s
    return Cost(
        prefill.queue_s, compute_s, slot_s, head_s, tail_s, decode_s, affinity_s, harm_s, total_s
    )


def local_cost(
    need: Need,
    decode: Workers,
    part: DecodePart,
    *,
    num_cached_decode: Numbers = 0,
    num_strangers: Numbers = 0,
) -> Cost:
    """Cost of a decode worker that computes the prompt itself, between its streams' steps."""
    num_uncached = maximum(need.num_tokens - num_cached_decode, 1)
    compute_s = prefill_s(num_uncached, decode)
    affinity_s = num_strangers * AFFINITY_SHARE * compute_s
    slot_s, decode_s = part.slot_wait_s, part.decode_s
    # The streams' steps come anyway; the prompt's tokens only make them longer. Who waits for room
    # there waits longer, too.
    harm_s = part.harm_s + HARM_WEIGHT * decode.num_requests * num_uncached * decode.added_s
    total_s = decode.queue_s + maximum(compute_s, slot_s) + decode_s + affinity_s + harm_s
    return Cost(decode.queue_s, compute_s, slot_s, 0.0, 0.0, decode_s, affinity_s, harm_s, total_s)


def pair_bound(need: Need, prefill: Workers, num_cached: Numbers) -> Numbers:
    """Seconds below which no pair with `prefill` can cost."""
    num_uncached = maximum(need.num_tokens - num_cached, 1)
    return prefill.queue_s + prefill_s(num_uncached, prefill)


def _at(term: Numbers, place: tuple[int, ...]) -> float:
    if isinstance(term, float):
        return term
    return float(term[place] if term.shape[-1] > 1 else term[*place[:-1], 0])


def _slot_wait_s(need: Need, decode: Workers, num_cached: Numbers) -> Numbers:
    """Until a running request makes room, for a sequence and for its blocks; 0 if there is."""
    # All choices share the prompt's blocks but one each.
    num_new = need.num_tokens + 1 - num_cached + (need.num_choices - 1) * decode.block_size
    # Who was promised room before takes it first.
    num_wanted = ceil((num_new + decode.promised_tokens) / decode.block_size)
    num_missing = num_wanted - decode.num_free_blocks
    num_over = decode.num_requests + need.num_choices - decode.max_num_seqs
    seq_share = maximum(num_over, 0) / maximum(decode.max_num_seqs, 1)
    block_share = maximum(num_missing, 0) / maximum(decode.num_used_blocks, 1)
    stream_s = decode.fixed_s * max(need.num_output_tokens, 1)
    return maximum(seq_share, block_share) * stream_s
