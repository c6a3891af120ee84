"""Loads of round numbers: a prompt token takes 1 ms, a worker holds 10 streams and 1,000 tokens."""

from typing import Any

from router.scaling.config import DecodeScaling, PrefillScaling, ScalingConfig
from router.scaling.load import ClusterLoad, DecodeLoad, PrefillLoad

PREFILL: dict[str, Any] = {"num_workers": 1, "token_s": 0.001}
DECODE: dict[str, Any] = {"num_workers": 1, "max_streams": 10.0, "max_kv_tokens": 1000.0}


def load(
    now_s: float = 0.0,
    *,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    queued_requests: int = 0,
    queued_tokens: int = 0,
) -> ClusterLoad:
    return ClusterLoad(
        now_s=now_s,
        prefill=PrefillLoad(**{**PREFILL, **(prefill or {})}),
        decode=DecodeLoad(**{**DECODE, **(decode or {})}),
        queued_requests=queued_requests,
        queued_tokens=queued_tokens,
    )


def config(*, up_s: float = 5.0, down_s: float = 30.0, most: int = 8) -> ScalingConfig:
    delays = {"up_delay_s": up_s, "down_delay_s": down_s}
    return ScalingConfig(
        prefill=PrefillScaling(min=1, max=most, ttft_s=2.0, busy_share=0.5, **delays),
        decode=DecodeScaling(min=1, max=most, itl_s=0.05, kv_share=0.5, seqs_share=0.5, **delays),
    )
