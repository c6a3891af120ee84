"""What the policy looks at: both pools and the router's queue at one moment, plain data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLoad:
    """The prefill workers that take prompts."""

    num_workers: int = 0
    waiting_tokens: int = 0  # uncached prompt tokens in front of their engines
    computed_tokens_per_s: float = 0.0  # by all of them together, of late
    token_s: float = 0.001  # one prompt token takes a worker, with its share of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLoad:
    """The decode workers that take streams."""

    num_workers: int = 0
    num_streams: int = 0  # running, waiting or on their way there
    max_streams: float = 1.0  # of one worker
    kv_tokens: int = 0  # in use or promised
    max_kv_tokens: float = 1.0  # of one worker
    step_s: float = 0.0  # of a step without the share of its streams, mean
    streams_s: float = 0.0  # that all streams together add to the steps of all workers


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLoad:
    """One moment."""

    now_s: float
    prefill: PrefillLoad = PrefillLoad()
    decode: DecodeLoad = DecodeLoad()
    queued_requests: int = 0  # in the router: no worker can take them yet
    queued_tokens: int = 0  # of their prompts
