"""What the decode side asks of one reception, and what it gets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.control import Commit
from kv_transfer.dialed_link import DialedLink
from kv_transfer.moved_range import MovedRange


class Reservation(Protocol):
    """Blocks for all tokens of a request; the first `num_cached_tokens` hold their KV already."""

    @property
    def block_ids(self) -> Sequence[int]:
        """Ids of the blocks, in token order."""

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that need not travel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveOrder:
    """Which hand-over to receive, over which link."""

    transfer_id: int
    epoch: int
    link: DialedLink
    num_tokens: int
    request_label: str = ""
    # bounds the whole reception, prefill included
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """All KV is in the blocks; decoding may start."""

    commit: Commit
    num_bytes: int
    # summed over the operations of this transfer
    transfer_s: float
    # from the commit to the last range's arrival
    tail_s: float
    num_cached_tokens: int
    # in the order of their arrival
    ranges: tuple[MovedRange, ...] = ()
