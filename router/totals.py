"""What every choice costs in all: the formula of `router/cost.py` over columns of workers.

    prefill workers  [P]        what each computes, and its queue
    decode workers   [D]        what each adds to any choice with it, and each alone
    links            [L, D]     the first of every decode worker, the second ...; each looks up the
                                numbers of its prefill worker

A few dozen array operations, whatever the number of workers; those on links are the long ones. No
term is kept: who is chosen is costed again, by itself. What may not be taken costs infinitely much.
"""

from math import inf
from typing import NamedTuple

import numpy as np

from router.cost import AFFINITY_SHARE, HARM_WEIGHT, Need
from router.pools import NOBODY, Columns, Floats, LinkTable, Mask


class Side(NamedTuple):
    """The workers of one pool as one request sees them."""

    columns: Columns
    mask: Mask  # who may be taken
    num_cached: Floats  # tokens of the prompt they hold, or soon will
    strangers: Floats | None  # 1 for all but the session's own; None: there is no session


def decode_totals(need: Need, decode: Side) -> tuple[Floats, Floats]:
    """What comes with a decode worker: seconds until it has room, and those that nothing hides."""
    columns, num_output_tokens = decode.columns, float(need.num_output_tokens)
    wait_s = columns.promised_tokens - decode.num_cached
    wait_s += need.num_tokens + 1.0
    if need.num_choices > 1:
        wait_s += (need.num_choices - 1.0) * columns.block_size
    wait_s /= columns.block_size
    np.ceil(wait_s, out=wait_s)
    wait_s -= columns.num_free_blocks
    wait_s *= columns.block_step_s
    np.maximum(wait_s, columns.seq_wait_s, out=wait_s)
    if need.num_choices > 1:
        num_over = columns.num_requests - columns.max_num_seqs + float(need.num_choices)
        np.maximum(wait_s, num_over * columns.seq_step_s, out=wait_s)
    wait_s *= max(num_output_tokens, 1.0)
    base_s = columns.kv_harm_s * need.num_kv_tokens
    base_s += columns.streams_s
    base_s *= HARM_WEIGHT * need.num_steps
    base_s += columns.company_s * num_output_tokens
    base_s[~decode.mask] = inf
    return wait_s, base_s


def put_local_totals(
    need: Need,
    decode: Side,
    *,
    num_confirmed: Floats,
    wait_s: Floats,
    base_s: Floats,
    out: Floats,
) -> None:
    """Of each decode worker alone: [D]. What a hand-over will bring saves no computation now."""
    columns = decode.columns
    num_uncached = float(need.num_tokens) - num_confirmed
    np.maximum(num_uncached, 1.0, out=num_uncached)
    np.multiply(num_uncached, columns.token_s, out=out)
    out += columns.fixed_s
    if decode.strangers is not None:
        base_s = base_s + AFFINITY_SHARE * decode.strangers * out
    np.maximum(out, wait_s, out=out)
    num_uncached *= columns.prompt_harm_s
    num_uncached *= HARM_WEIGHT
    out += num_uncached
    out += columns.queue_s
    out += base_s


def put_pair_totals(  # noqa: PLR0913 - the parts of the formula
    need: Need,
    prefill: Side,
    decode: Side,
    links: LinkTable,
    *,
    wait_s: Floats,
    base_s: Floats,
    out: Floats,
) -> None:
    """Of each link: [L, D]."""
    compute_s, last_bytes, total_s = _prefill_numbers(need, prefill).take(links.feeders, axis=1)
    columns = decode.columns
    sent_bytes = float(need.num_tokens) - decode.num_cached
    np.maximum(sent_bytes, 0.0, out=sent_bytes)
    np.minimum(last_bytes, sent_bytes, out=last_bytes)
    last_bytes *= columns.kv_bytes_per_token
    sent_bytes *= columns.kv_bytes_per_token
    sent_bytes += columns.pending_bytes
    if prefill.strangers is not None and decode.strangers is not None:
        num_strangers = np.append(prefill.strangers, 0.0)[links.feeders] + decode.strangers
        total_s += AFFINITY_SHARE / 2 * num_strangers * compute_s
    np.subtract(sent_bytes, last_bytes, out=out)
    out += links.queued_bytes
    out *= links.byte_s
    np.maximum(out, compute_s, out=out)
    np.maximum(out, wait_s, out=out)
    last_bytes *= links.byte_s
    last_bytes += links.latency_s
    out += last_bytes
    out += total_s
    out += base_s


def _prefill_numbers(need: Need, prefill: Side) -> Floats:
    """Seconds to compute, tokens in the last chunk, all else it costs: [3, P + 1].

    Behind them stands what a link to nobody finds.
    """
    columns = prefill.columns
    num_uncached = float(need.num_tokens) - prefill.num_cached
    np.maximum(num_uncached, 1.0, out=num_uncached)
    numbers = np.zeros((3, len(num_uncached) + 1))
    compute_s, num_last, rest_s = numbers[:, :-1]
    np.multiply(num_uncached, columns.token_s, out=compute_s)
    compute_s += columns.fixed_s
    np.minimum(num_uncached, columns.chunk_tokens, out=num_last)
    np.multiply(compute_s, HARM_WEIGHT * need.num_kept_waiting, out=rest_s)
    rest_s += columns.queue_s
    rest_s[~prefill.mask] = inf
    numbers[2, NOBODY] = inf
    return numbers
