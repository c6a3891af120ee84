"""How many workers a load keeps as busy as they should be: pure arithmetic, with the reason.

A demand is a number of workers with a fraction, such as 2.4. It grows with every signal and depends
on nothing else: not on how many workers there are now, and not on the past.
"""

from dataclasses import dataclass

from router.scaling.config import DecodeScaling, PrefillScaling
from router.scaling.load import ClusterLoad

WAIT_SHARE = 0.5  # of the TTFT objective that may pass before a prompt's own turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """So many workers, and which signal says so."""

    workers: float
    reason: str


def prefill_demand(load: ClusterLoad, config: PrefillScaling) -> Demand:
    """From the prompt tokens that come, and from those that wait beyond the TTFT head-room."""
    pool = load.prefill
    waiting = pool.waiting_tokens + load.queued_tokens
    wait_s = waiting * pool.token_s  # of one worker alone
    allowed_s = config.ttft_s * WAIT_SHARE
    busy = pool.computed_tokens_per_s * pool.token_s
    return max(
        Demand(
            workers=busy / config.busy_share,
            reason=f"{pool.computed_tokens_per_s:.0f} prompt tokens/s keep {busy:.1f} worker(s)"
            f" busy; {config.busy_share:.0%} of the time is meant",
        ),
        Demand(
            workers=wait_s / allowed_s,
            reason=f"{waiting} uncached prompt tokens wait, {wait_s:.1f} s for one worker;"
            f" {allowed_s:g} s is the TTFT head-room",
        ),
        key=lambda demand: demand.workers,
    )


def decode_demand(load: ClusterLoad, config: DecodeScaling) -> Demand:
    """From places, from KV blocks, and from the head-room under the ITL objective."""
    pool = load.decode
    num_streams = pool.num_streams + load.queued_requests
    kv_tokens = pool.kv_tokens + load.queued_tokens
    demands = [
        Demand(
            workers=num_streams / (pool.max_streams * config.seqs_share),
            reason=f"{num_streams} streams for {pool.max_streams:.0f} places a worker;"
            f" {config.seqs_share:.0%} is meant",
        ),
        Demand(
            workers=kv_tokens / (pool.max_kv_tokens * config.kv_share),
            reason=f"{kv_tokens} tokens of KV in use or promised, {pool.max_kv_tokens:.0f} fit a"
            f" worker; {config.kv_share:.0%} is meant",
        ),
    ]
    # A step that is too slow with one stream is no faster with more workers, and a worker without a
    # stream makes none faster: what is measured of few streams may be all noise.
    if (headroom_s := config.itl_s - pool.step_s) > 0:
        demands.append(
            Demand(
                workers=min(pool.streams_s / headroom_s, float(num_streams)),
                reason=f"{num_streams} streams add {pool.streams_s * 1000:.1f} ms to steps of"
                f" {pool.step_s * 1000:.1f} ms; ITL head-room is {headroom_s * 1000:.1f} ms",
            )
        )
    return max(demands, key=lambda demand: demand.workers)
