"""The one cost formula: seconds until the first decoded token may follow, plus harm to others.

    queue + max(prefill, slot_wait, transfer of all but the last chunk)
          + transfer of the last chunk + HARM_WEIGHT x (seconds added to other running streams)

It weighs every linked pair and, without transfer, every decode worker alone. All rates come from
the workers' own reports; the constants below only stand in where nothing was measured yet.
"""

from dataclasses import asdict, dataclass

from router.worker_view import LinkView, WorkerView

HARM_WEIGHT = 1.0  # a second added to another stream is worth a second of ours
UNMEASURED_TOKENS_PER_S = 1000.0
UNMEASURED_BYTES_PER_S = 100e6
UNMEASURED_STEP_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one request asks of its workers."""

    num_tokens: int  # prompt and replayed output
    num_output_tokens: int  # expected still to come
    num_cached_prefill: int = 0  # tokens the prefill worker in question holds
    num_cached_decode: int = 0  # tokens the decode worker in question holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The terms, in seconds."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    slot_wait_s: float = 0.0
    transfer_head_s: float = 0.0  # all but the last chunk; flows while prefill goes on
    transfer_tail_s: float = 0.0  # the last chunk
    harm_s: float = 0.0  # weighted

    @property
    def own_s(self) -> float:
        """What this request itself waits."""
        overlapped = max(self.prefill_s, self.slot_wait_s, self.transfer_head_s)
        return self.queue_s + overlapped + self.transfer_tail_s

    @property
    def total_s(self) -> float:
        """What the policy minimises."""
        return self.own_s + self.harm_s

    def terms(self) -> dict[str, float]:
        """Every term and the total, for spans and the status page."""
        return {**asdict(self), "total_s": self.total_s}


def pair_cost(need: Need, prefill: WorkerView, decode: WorkerView, link: LinkView) -> Cost:
    """Cost of computing on `prefill` and handing over to `decode`."""
    num_uncached = max(need.num_tokens - need.num_cached_prefill, 1)
    rate = _tokens_per_s(prefill)
    num_to_send = max(need.num_tokens - need.num_cached_decode, 0)
    num_last = min(num_to_send, num_uncached, max(prefill.max_num_batched_tokens, 1))
    bytes_per_token = decode.kv_bytes_per_token
    bandwidth = link.bandwidth_bytes_per_s or UNMEASURED_BYTES_PER_S
    queued = link.queued_bytes + decode.pending.num_bytes
    head_bytes = queued + (num_to_send - num_last) * bytes_per_token
    return Cost(
        queue_s=prefill.num_tokens_ahead / rate,
        prefill_s=num_uncached / rate,
        slot_wait_s=slot_wait_s(need, decode),
        transfer_head_s=head_bytes / bandwidth,
        transfer_tail_s=link.latency_s + num_last * bytes_per_token / bandwidth,
        harm_s=HARM_WEIGHT * _decode_harm_s(need, decode),
    )


def local_cost(need: Need, decode: WorkerView) -> Cost:
    """Cost of a decode worker that computes the prompt itself, between its streams' steps."""
    num_uncached = max(need.num_tokens - need.num_cached_decode, 1)
    prefill_s = num_uncached / _tokens_per_s(decode)
    return Cost(
        queue_s=decode.num_tokens_ahead / _tokens_per_s(decode),
        prefill_s=prefill_s,
        slot_wait_s=slot_wait_s(need, decode),
        harm_s=HARM_WEIGHT * (decode.num_running * prefill_s + _decode_harm_s(need, decode)),
    )


def slot_wait_s(need: Need, decode: WorkerView) -> float:
    """Until a running request makes room, for a sequence and for its blocks."""
    stream_s = (decode.step_s or UNMEASURED_STEP_S) * max(need.num_output_tokens, 1)
    num_over = decode.num_requests + 1 - decode.max_num_seqs
    seq_wait_s = max(num_over, 0) * stream_s / max(decode.max_num_seqs, 1)
    num_new = max(need.num_tokens + 1 - need.num_cached_decode, 0)
    num_missing = -(-num_new // decode.block_size) - decode.num_free_blocks
    block_wait_s = max(num_missing, 0) * stream_s / max(decode.num_used_blocks, 1)
    return max(seq_wait_s, block_wait_s)


def _decode_harm_s(need: Need, decode: WorkerView) -> float:
    # One more row makes each step longer by about what one token costs to compute.
    num_streams = min(decode.num_requests, decode.max_num_seqs)
    return num_streams * need.num_output_tokens / _tokens_per_s(decode)


def _tokens_per_s(worker: WorkerView) -> float:
    return worker.prefill_tokens_per_s or UNMEASURED_TOKENS_PER_S
