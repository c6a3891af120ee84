"""Chooses how attention is computed."""

from collections.abc import Callable, Sequence

import torch

from engine.attention import StepAttention
from engine.gathered_attention import GatheredAttention
from engine.kv_cache import KVCache
from engine.native.library import load_library
from engine.native_attention import NativeAttention
from engine.schedule import ScheduledRequest

AttentionPlanner = Callable[[Sequence[ScheduledRequest], KVCache], StepAttention]


def choose_attention(wanted: str, device: torch.device) -> AttentionPlanner:
    """What plans each step's attention; ValueError when `wanted` cannot be had here."""
    is_native = is_compiled(wanted, device)
    if wanted in {"native", "paged"} and not is_native:
        what = "library" if wanted == "native" else "kernel"
        raise ValueError(f"Got attention = {wanted!r} but expected 'torch': no {what} for {device}")
    return NativeAttention.plan if is_native else GatheredAttention.plan


def is_compiled(wanted: str, device: torch.device) -> bool:
    """Whether our compiled library computes here."""
    return wanted in {"auto", "native"} and device.type == "cpu" and load_library()
