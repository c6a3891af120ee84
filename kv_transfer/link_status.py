"""How a link looks from outside: for load reports and `relevo status`."""

from dataclasses import dataclass
from enum import StrEnum


class LinkState(StrEnum):
    """Only READY carries KV."""

    CONNECTING = "connecting"
    READY = "ready"
    BROKEN = "broken"
    INCOMPATIBLE = "incompatible"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatus:
    """One link as one of its workers sees it."""

    peer_id: str
    peer_incarnation: int
    state: LinkState
    generation: int
    backend: str
    # why it is not ready; or, when it is, why it goes over this backend
    reason: str = ""
    bandwidth_bytes_per_s: float = 0.0
    # round trip of a fetch beside the data itself
    latency_s: float = 0.0
    queued_bytes: int = 0
    # since this generation was made
    moved_bytes: int = 0
