"""The fault points `kv_send` and `kv_recv`: what a plan may do to one operation of a link."""

from collections.abc import Callable

import torch

from faults.plan import fault_point
from kv_transfer.backend import LinkTimeoutError
from kv_transfer.link import Link

_SPOILED_BYTES = 64


def ask_fault_plan(
    point: str, link: Link, *, request_label: str
) -> Callable[[torch.Tensor], None] | None:
    """Let the plan act on the operation that is about to start, on the link's thread.

    Returns what spoils each message when the plan says `corrupt`. `drop` loses this side's half:
    nothing is posted, also not what comes after it, until the other side's deadline ends the link.
    """
    verdict = fault_point(point, request_label=request_label)
    if verdict == "drop":
        link.wait_aborted(link.spec.timeout_s)
        raise LinkTimeoutError(f"fault at {point}: operation dropped")
    return _spoil if verdict == "corrupt" else None


def _spoil(message: torch.Tensor) -> None:
    message[:_SPOILED_BYTES].bitwise_xor_(0xFF)
